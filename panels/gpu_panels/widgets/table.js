// Draws the rows of the widget Table, and changes the cells that differ. The content of a cell is text, never HTML.
const HOURS = {hourCycle: "h23", hour: "2-digit", minute: "2-digit", second: "2-digit"}
const [TEXT, VALUE, HINT, KIND, COLOUR, TEXTURE] = [0, 1, 2, 3, 4, 5]

function made(tag, kind, parent) {
  const node = document.createElement(tag)
  if (kind) node.className = kind
  if (parent) parent.append(node)
  return node
}

function compare(one, other, numeric) {
  const [a, b] = [one[VALUE], other[VALUE]]
  if (a !== null && b !== null) return a - b
  if (a !== null || b !== null) return a === null ? 1 : -1  // unknown values are last
  return one[TEXT].localeCompare(other[TEXT], undefined, {numeric: true})
}

function clock(cell, td) {  // in the viewer's time zone, in 24 hours as every other time on the page
  const date = new Date(1000 * cell[VALUE])
  td.title = date.toLocaleString()
  const time = date.toLocaleTimeString(undefined, HOURS)
  const isToday = date.toDateString() === new Date().toDateString()
  const day = isToday ? "" : date.toLocaleDateString(undefined, {dateStyle: "short"})
  return [cell[TEXT], day, time].filter(Boolean).join(" ")  // the text is a word such as "before"
}

function fill(td, cell, [title, numeric]) {
  td.dataset.title = title  // on a phone a row is a card, with a title in front of each cell
  td.className = [numeric ? "num" : "", cell[KIND]].filter(Boolean).join(" ")
  td.title = cell[HINT]
  td.classList.toggle("none", cell[KIND] !== "time" && ["", "–"].includes(cell[TEXT]))
  td.replaceChildren()
  if (cell[COLOUR]) {
    const swatch = made("span", `swatch ${{".": "dots", "-": "stripes"}[cell[TEXTURE]] || ""}`, td)
    swatch.style.backgroundColor = cell[COLOUR]
  }
  td.append(cell[KIND] === "time" ? clock(cell, td) : cell[TEXT])
}

export function render({model}) {
  const root = made("div", "rows")
  const tools = made("div", "tools", model.filters ? root : null)
  const filter = made("input", "", tools)
  filter.type = "search"
  filter.placeholder = "Filter: words that a row contains"
  filter.setAttribute("aria-label", "Filter the rows")
  const count = made("span", "count", tools)
  const frame = made("div", "frame", root)
  const table = made("table", "", frame)
  const head = made("tr", "", made("thead", "", table))
  const body = made("tbody", "", table)
  const note = made("div", "empty", root)
  const shown = new Map()  // id -> {tr, cells, row}
  const below = made("tr", "detail")
  let sorted = {column: -1, down: false}

  function headers() {
    head.replaceChildren()
    model.columns.forEach(([title, numeric, hint], n) => {
      const th = made("th", numeric ? "num" : "", head)
      const button = made("button", "", th)
      button.textContent = title
      button.title = hint || `Sort by ${title.toLowerCase()}`
      button.onclick = () => {
        if (sorted.column !== n) sorted = {column: n, down: Boolean(numeric)}  // numbers: the largest first
        else if (sorted.down === Boolean(numeric)) sorted = {column: n, down: !sorted.down}
        else sorted = {column: -1, down: false}  // the third click: the original order
        draw()
      }
    })
    made("td", "buttons", head)
  }

  function press(id, verb, button) {
    window.gpuOpener = button  // gets the focus back when the dialog closes; see confirmation.js
    model.send_msg({id, verb})
  }

  function drawn(row) {
    const [id, cells, buttons] = row
    let seen = shown.get(id)
    if (!seen) {
      const tr = made("tr")
      seen = {tr, row: null, cells: cells.map(() => made("td", "", tr)), last: made("td", "buttons", tr)}
      shown.set(id, seen)
    }
    cells.forEach((cell, n) => {
      if (!seen.row || JSON.stringify(seen.row[1][n]) !== JSON.stringify(cell)) {
        fill(seen.cells[n], cell, model.columns[n])
      }
    })
    if (!seen.row || JSON.stringify(seen.row[2]) !== JSON.stringify(buttons)) {
      const focused = seen.last.getRootNode().activeElement?.dataset?.verb
      seen.last.replaceChildren()
      for (const [verb, label, why_not] of buttons) {
        const button = made("button", "act", seen.last)
        button.textContent = label
        button.dataset.verb = verb
        button.title = why_not || model.means[verb.split(" ")[0]] || `${label} ${cells[0][TEXT]}`
        button.setAttribute("aria-label", `${label}: ${cells[0][TEXT]}${why_not ? `. ${why_not}` : ""}`)
        button.disabled = Boolean(why_not)
        button.onclick = () => press(id, verb, button)
        if (why_not && buttons.length === 1) made("div", "why", seen.last).textContent = why_not
        if (verb === focused && seen.tr.contains(document.activeElement)) button.focus()
      }
    }
    seen.row = row
    return seen.tr
  }

  // What is below one row: a title, a table without buttons, and sentences.
  function drawDetail(order) {
    const text = model.detail
    if (below.drawn !== text) {
      below.drawn = text
      below.replaceChildren()
      const {id, title, columns, rows, lines} = text ? JSON.parse(text) : {lines: [], rows: []}
      below.of = id
      const cell = made("td", "", below)
      cell.colSpan = model.columns.length + 1
      const top = made("div", "top", cell)
      made("b", "", top).textContent = title
      const hide = made("button", "act", top)
      hide.textContent = "Hide"
      hide.onclick = () => press(id, "hide", hide)
      if (rows.length) {
        const inner = made("table", "", cell)
        const titles = made("tr", "", made("thead", "", inner))
        for (const [name, numeric, hint] of columns) {
          const th = made("th", numeric ? "num" : "", titles)
          th.textContent = name
          th.title = hint
        }
        const list = made("tbody", "", inner)
        for (const [, cells] of rows) {
          const tr = made("tr", "", list)
          cells.forEach((one, n) => fill(made("td", "", tr), one, columns[n]))
        }
      }
      for (const [words, kind] of lines) made("div", kind, cell).textContent = words
    }
    const at = below.of ? order.indexOf(shown.get(below.of)?.tr) : -1
    if (at >= 0) order.splice(at + 1, 0, below)
  }

  function showNote(text) {  // text between backticks is code to type
    note.replaceChildren(...text.split("`").map((part, n) => {
      const piece = document.createElement(n % 2 ? "code" : "span")
      piece.textContent = part
      return piece
    }))
    note.hidden = !text
  }

  function draw() {
    const rows = JSON.parse(model.rows)
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean)
    const kept = rows.filter(([, cells]) => {
      const text = cells.map((cell) => `${cell[TEXT]} ${cell[HINT]}`).join(" ").toLowerCase()
      return words.every((word) => text.includes(word))
    })
    if (sorted.column >= 0) {
      const n = sorted.column
      kept.sort((one, other) => compare(one[1][n], other[1][n]) * (sorted.down ? -1 : 1))
    }
    head.querySelectorAll("th").forEach((th, n) => {
      const here = n === sorted.column
      th.setAttribute("aria-sort", here ? (sorted.down ? "descending" : "ascending") : "none")
    })
    const there = new Set(rows.map(([id]) => id))
    for (const [id, seen] of shown) {
      if (!there.has(id)) { seen.tr.remove(); shown.delete(id) }
    }
    const order = kept.map(drawn)
    drawDetail(order)
    const wanted = new Set(order)
    for (const tr of [...body.children]) if (!wanted.has(tr)) tr.remove()
    order.forEach((tr, n) => { if (body.children[n] !== tr) body.insertBefore(tr, body.children[n] || null) })
    root.classList.toggle("acts", rows.some(([, , buttons]) => buttons.length))
    table.hidden = !kept.length
    tools.hidden = !rows.length
    count.textContent = words.length ? `${kept.length} of ${rows.length}` : `${rows.length}`
    showNote(rows.length ? (kept.length ? "" : "No row contains all these words.") : model.empty)
  }

  // The words of the filter are in the URL, so that a reload keeps them. A notebook's URL is not ours.
  const isOurs = model.key && document.querySelector("html[data-gpu-console]")
  const kept = () => new URL(location.href).searchParams.get(model.key) ?? ""
  if (isOurs) filter.value = kept()
  filter.oninput = () => {
    if (isOurs) {
      const url = new URL(location.href)
      if (filter.value) url.searchParams.set(model.key, filter.value)
      else url.searchParams.delete(model.key)
      history.replaceState(history.state, "", url)
    }
    draw()
  }
  headers()
  draw()
  model.on("rows", draw)
  model.on("empty", draw)
  model.on("detail", draw)
  model.on("columns", () => { shown.clear(); body.replaceChildren(); headers(); draw() })
  return root
}
