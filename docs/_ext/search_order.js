/* The site's search. Sphinx's own finds only pages that have all words of the query, and no sections.
 *
 * - Of pages, answers come first, then references, and pages of history and figures last.
 * - A word also finds those that we use for the same thing (ALSO).
 * - If few pages have all words, those are shown, too, that have most of them; a rare word counts more.
 * - A section is found by the words of its heading.
 *
 * The rest of Scorer is Sphinx's default (searchtools.js). */
var Scorer = {
  score: ([page, , , , score]) => {
    const weights = [
      [/^(faq|guides\/troubleshooting)/, 5],
      [/^(installation|getting_started|contributing|guides\/)/, 4],
      [/^(_notebooks\/)/, -2],
      [/^(changelog|comparison|figures|not_built|architecture|index|genindex)/, -4],
    ];
    const found = weights.find(([pages]) => pages.test(page));
    return score + (found ? found[1] : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

/* What people type, and the words of these pages. */
const ALSO = {
  adapter: "lora", capacity: "ram", chargeback: "hours report", cost: "hours report", internally: "traced",
  kubespawner: "kubernetes", parallel: "split several", retention: "kept", screenshots: "pictures", speed: "long figures",
  state: "files", stored: "files", air: "network", ansible: "install", audit: "journal", backup: "back copy", benchmark: "bench",
  cap: "limit", class: "lecture", crash: "died", daemon: "keeper", delete: "remove", download: "downloaded hub",
  gdpr: "sees", gpu: "card", gpus: "cards", frozen: "stuck hangs waits", hang: "stuck waits", huggingface: "hugging hub", kill: "end", leak: "who", max: "most limit",
  alive: "keep_alive", issue: "bug", mount: "container", multiple: "several many", nfs: "network", notification: "told alerts problem", offline: "network", oom: "memory",
  permission: "may operator", pipeline: "transformers", position: "order waiting", priority: "importance",
  privacy: "sees", queue: "waiting", quota: "limit", reserve: "claim room", reservation: "lecture claim",
  restart: "again", role: "operator member", rollback: "back older", schedule: "jobs", selinux: "containers",
  slack: "webhook mail", slow: "seconds", startup: "start", student: "user groups",
  tutorial: "started", twice: "share", uninstall: "remove", unload: "evict", vram: "card", windows: "wsl",
};
const FEW = 4; // pages with all words: with fewer, others are shown, too
const MOST_FOUND = 12;
const stems = (words) => words.split(" ").map((word) => new Stemmer().stemWord(word.toLowerCase()));

if (typeof Search !== "undefined") {
  const plain = Search.performTermsSearch;
  let also; // ALSO by stems; the stemmer may be defined after this file
  const groups = (terms) => {
    also ??= Object.fromEntries(Object.entries(ALSO).map(([word, same]) => [stems(word)[0], stems(same)]));
    return [...terms].map((term) => [term, ...(also[term] ?? [])]);
  };

  /* The pages with each of the `terms`: [result, number of terms, score]. */
  function pages(terms, excluded) {
    const found = new Map();
    for (const group of groups(terms)) {
      const best = new Map();
      group.forEach((word, position) => {
        for (const result of plain(new Set([word]), excluded)) {
          const score = position ? result[4] / 2 : result[4]; // the typed word counts more than its likes
          if (score > (best.get(result[0])?.[4] ?? 0)) best.set(result[0], result.with(4, score));
        }
      });
      const rare = Math.log((Search._index.docnames.length + 1) / (best.size + 0.5));
      for (const [page, result] of best) {
        const [, count, score] = found.get(page) ?? [null, 0, 0];
        found.set(page, [result, count + 1, score + rare * result[4]]);
      }
    }
    return [...found.values()];
  }

  /* The sections whose heading has two of the `terms` or more, or the only one. */
  function* sections(terms) {
    const { alltitles, docnames, filenames, titles } = Search._index;
    const wanted = groups(terms);
    for (const [title, places] of Object.entries(alltitles)) {
      const words = new Set(splitQuery(title.toLowerCase()).flatMap(stems));
      const count = wanted.filter((group) => group.some((word) => words.has(word))).length;
      if (count < Math.min(2, wanted.length)) continue;
      for (const [file, id] of places)
        if (id !== null)
          yield [docnames[file], `${titles[file]} > ${title}`, `#${id}`, null,
            (20 * count) / wanted.length, filenames[file], SearchResultKind.title];
    }
  }

  Search.performTermsSearch = (terms, excluded) => {
    const worth = ([, count, score]) => (count === terms.size ? 2 * score : score);
    const found = pages(terms, excluded).sort((a, b) => worth(b) - worth(a));
    const whole = found.filter(([, count]) => count === terms.size);
    const shown = whole.length < FEW ? found.slice(0, MOST_FOUND) : whole;
    const top = Math.max(...shown.map(worth));
    return [...shown.map((page) => page[0].with(4, (15 * worth(page)) / top)), ...sections(terms)];
  };
}
