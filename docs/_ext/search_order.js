/* The order of the site's search: answers first, then references, and pages of history and figures last. The rest of the
 * object is Sphinx's own default (searchtools.js). */
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
