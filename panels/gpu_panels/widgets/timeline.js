// Draws timeline.py: a row for each model, arrows from a victim to the model that needed its room, what the cards
// measured, and the events as lines that open. All texts are set as text, never as HTML.
const ROW = 26, FIGURES = 40, AXIS = 22  // pixels
const NS = "http://www.w3.org/2000/svg"
const LINES = {"%": "busy", "°C": "celsius", "W": "watts"}

function made(tag, kind, parent, text) {
  const node = document.createElement(tag)
  if (kind) node.className = kind
  if (text !== undefined) node.textContent = text
  if (parent) parent.append(node)
  return node
}

function svg(tag, attributes, parent, hint) {
  const node = document.createElementNS(NS, tag)
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value)
  if (hint) {
    const title = document.createElementNS(NS, "title")
    title.textContent = hint
    node.append(title)
  }
  parent.append(node)
  return node
}

const two = (n) => String(n).padStart(2, "0")

function clock(wall, seconds) {  // in the viewer's time zone, as every time on the page
  const at = new Date(1000 * wall)
  return `${two(at.getHours())}:${two(at.getMinutes())}${seconds ? `:${two(at.getSeconds())}` : ""}`
}

function stamp(wall) {
  const at = new Date(1000 * wall)
  const today = at.toDateString() === new Date().toDateString()
  return today ? clock(wall, true) : `${at.toLocaleDateString(undefined, {dateStyle: "short"})} ${clock(wall, true)}`
}

function local(wall) {  // as <input type=datetime-local> wants it
  const at = new Date(1000 * wall)
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}T${clock(wall, true)}`
}

export function render({model}) {
  const root = made("div", "history")
  const tools = made("div", "tools", root)
  const search = made("input", "search", tools)
  search.type = "search"
  search.placeholder = "Model, notebook or user"
  search.setAttribute("aria-label", "Show only rows and lines with these words")
  const free = made("div", "free", tools)
  const limits = ["From", "to"].map((name) => {
    const label = made("label", "", free, `${name} `)
    const input = made("input", "", label)
    input.type = "datetime-local"
    input.step = 1
    return input
  })
  const go = made("button", "act", free, "Show this time")
  const note = made("div", "note", root)
  const frame = made("div", "frame", root)
  const names = made("div", "names", frame)
  const area = made("div", "area", frame)
  const legend = made("div", "legend", root)
  const chips = made("div", "chips", root)
  chips.setAttribute("role", "group")
  chips.setAttribute("aria-label", "Kinds of events")
  const list = made("div", "lines", root)
  const empty = made("div", "empty", root)
  let data = {rows: [], arrows: [], figures: [], gaps: [], cards: []}
  const known = new Map()
  const isOurs = document.querySelector("html[data-gpu-console]")
  const address = (name) => (isOurs && new URL(location.href).searchParams.get(name)) || ""
  const chosen = new Set(address("kinds").split(" ").filter(Boolean))
  search.value = address("words")

  function keep(name, value) {
    if (!isOurs) return
    const url = new URL(location.href)
    if (value) url.searchParams.set(name, value)
    else url.searchParams.delete(name)
    history.replaceState(history.state, "", url)
  }

  const words = () => search.value.toLowerCase().split(/\s+/).filter(Boolean)
  const matches = (text) => words().every((word) => text.toLowerCase().includes(word))

  // -- the drawing

  function draw() {
    const picture = JSON.parse(model.drawing)
    if (!picture.rows) return
    data = picture
    const rows = data.rows.filter(({title}) => matches(title))
    const width = area.clientWidth || 600
    const x = (at) => at * width / 1000
    const top = new Map(rows.map(({key}, n) => [key, AXIS + n * ROW]))
    const bottom = AXIS + rows.length * ROW
    const height = bottom + data.figures.length * FIGURES
    names.replaceChildren(made("div", "axis"))
    area.replaceChildren()
    const sheet = svg("svg", {width, height, role: "group", "aria-label": "Timeline"}, area)
    patterns(sheet)
    drawTicks(sheet, width, height)
    for (const [start, end] of data.gaps) {
      svg("rect", {x: x(start), y: AXIS, width: x(end - start), height: height - AXIS, class: "gap"}, sheet, "nothing was recorded")
    }
    for (const row of rows) drawRow(sheet, row, top.get(row.key), x, width)
    data.figures.forEach((one, n) => drawFigures(sheet, one, bottom + n * FIGURES, x, width))
    for (const arrow of data.arrows) drawArrow(sheet, arrow, top, x, width)
    note.textContent = data.note
    note.hidden = !data.note
    drawLegend()
    for (const [n, wall] of [data.start, data.end].entries()) {
      if (limits[n].getRootNode().activeElement !== limits[n]) limits[n].value = local(wall)
    }
  }

  function patterns(sheet) {
    const all = svg("defs", {}, sheet)
    const ram = svg("pattern", {id: "ram", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"}, all)
    svg("rect", {width: 2.5, height: 6, class: "stripe"}, ram)
    const gap = svg("pattern", {id: "gap", width: 8, height: 8, patternUnits: "userSpaceOnUse", patternTransform: "rotate(-45)"}, all)
    svg("rect", {width: 1, height: 8, class: "stripe"}, gap)
  }

  function drawTicks(sheet, width, height) {
    const seconds = data.end - data.start
    const steps = [1, 5, 15, 30, 60, 300, 900, 1800, 3600, 10800, 21600, 86400]
    const step = steps.find((one) => seconds / one <= Math.max(2, width / 90)) ?? 86400
    const zone = -60 * new Date(1000 * data.start).getTimezoneOffset()
    for (let wall = Math.ceil((data.start + zone) / step) * step - zone; wall <= data.end; wall += step) {
      const at = (wall - data.start) / seconds * width
      svg("line", {x1: at, x2: at, y1: AXIS - 4, y2: height, class: "grid"}, sheet)
      const text = svg("text", {x: at, y: 12, class: "tick", "text-anchor": at < 24 ? "start" : at > width - 24 ? "end" : "middle"}, sheet)
      text.textContent = step >= 86400 ? new Date(1000 * wall).toLocaleDateString(undefined, {month: "short", day: "numeric"}) : clock(wall, step < 60)
    }
  }

  function drawRow(sheet, row, y, x, width) {
    const name = made("div", "name", names, row.title)
    name.title = row.title
    svg("line", {x1: 0, x2: width, y1: y + ROW, y2: y + ROW, class: "line"}, sheet)
    const group = svg("g", {role: "img", "aria-label": row.words}, sheet)
    for (const [start, end, device, hint] of row.bars) {
      const inRam = !data.cards.includes(device)
      const box = {x: x(start), y: y + (inRam ? 9 : 4), width: Math.max(1.5, x(end - start)), height: inRam ? ROW - 18 : ROW - 8}
      const words = `${row.title}\n${hint}, from ${stamp(data.start + start / 1000 * (data.end - data.start))}`
      svg("rect", {...box, class: inRam ? "ram" : "card", fill: row.colour}, group, words)
      if (inRam) svg("rect", {...box, fill: "url(#ram)"}, group, words)
      else if (data.cards.length > 1 && box.width > 60) {  // a card is a position: its name stands in the bar
        const text = svg("text", {x: box.x + 5, y: box.y + 13, class: "of-card"}, group)
        text.textContent = device
      }
    }
  }

  function drawArrow(sheet, {at, victim, heir, label, hint}, top, x, width) {
    if (!top.has(victim) || !top.has(heir)) return
    const from = top.get(victim) + ROW / 2, to = top.get(heir) + ROW / 2, down = to > from ? 1 : -1
    const place = Math.min(width - 4, Math.max(4, x(at)))
    const group = svg("g", {class: "arrow"}, sheet, hint)
    svg("path", {d: `M${place} ${from} V${to - 5 * down} M${place - 4} ${to - 9 * down} L${place} ${to - 3 * down} L${place + 4} ${to - 9 * down}`}, group)
    svg("circle", {cx: place, cy: from, r: 2.5}, group)
    if (!label) return
    const right = place > width - 90
    const text = svg("text", {x: place + (right ? -6 : 6), y: (from + to) / 2 + 4, "text-anchor": right ? "end" : "start"}, group)
    text.textContent = label
  }

  function drawFigures(sheet, one, y, x, width) {
    const name = made("div", "name figures", names)
    made("b", "", name, one.device)
    made("span", "", name, one.now || "not measured")
    name.title = `${one.device}: ${one.now || "not measured"}. Filled: busy, 0 to 100 %. Line: temperature, 20 to 100 °C. Dashes: power, at most ${Math.round(one.highest_watts)} W`
    const group = svg("g", {role: "img", "aria-label": name.title}, sheet)
    svg("line", {x1: 0, x2: width, y1: y + FIGURES, y2: y + FIGURES, class: "line"}, group)
    const high = FIGURES - 6
    const parts = {"%": (value) => value / 100, "°C": (value) => (value - 20) / 80, "W": (value) => value / (one.highest_watts || 1)}
    for (const [unit, pieces] of Object.entries(one.lines)) {
      for (const piece of pieces) {
        const points = piece.map(([at, value]) => `${x(at).toFixed(1)} ${(y + FIGURES - Math.min(1, Math.max(0, parts[unit](value))) * high).toFixed(1)}`)
        const closed = unit === "%" ? `V${y + FIGURES} H${x(piece[0][0]).toFixed(1)} Z` : ""
        svg("path", {d: `M${points.join("L")}${closed}`, class: LINES[unit]}, group)
      }
    }
    svg("rect", {x: 0, y, width, height: FIGURES, fill: "transparent"}, group, name.title)
  }

  function drawLegend() {
    legend.replaceChildren()
    made("span", "", legend, "A colour is a process.")
    const card = made("span", "", legend)
    made("i", "", card)
    card.append("on a card")
    const ram = made("span", "", legend)
    made("i", "hatched", ram)
    ram.append("in RAM")
    made("span", "", legend, "● → evicted for")
    made("span", "", legend, "To zoom in, drag.")
  }

  // -- a custom range: dragged in the drawing, or typed

  function ask(start, end) {
    if (end - start >= 1) model.send_msg({start, end})
  }
  go.onclick = () => ask(...limits.map((input) => new Date(input.value).getTime() / 1000))
  let begun = null
  const wallAt = (event) => {
    const box = area.getBoundingClientRect()
    const part = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width))
    return data.start + part * (data.end - data.start)
  }
  area.onpointerdown = (event) => {
    if (event.pointerType === "touch") return  // a finger scrolls
    begun = {x: event.clientX, wall: wallAt(event), mark: made("div", "chosen", area)}
    area.setPointerCapture(event.pointerId)
  }
  area.onpointermove = (event) => {
    if (!begun) return
    const box = area.getBoundingClientRect()
    begun.mark.style.left = `${Math.min(begun.x, event.clientX) - box.left}px`
    begun.mark.style.width = `${Math.abs(begun.x - event.clientX)}px`
  }
  area.onpointerup = (event) => {
    if (!begun) return
    const {wall, x, mark} = begun
    mark.remove()
    begun = null
    if (Math.abs(event.clientX - x) > 6) ask(...[wall, wallAt(event)].sort((a, b) => a - b))
  }
  area.onpointercancel = () => { begun?.mark.remove(); begun = null }

  // -- the lines

  function makeLine(line) {
    const node = made("details", line.is_problem ? "line problem" : "line")
    const summary = made("summary", "", node)
    made("span", "when", summary, stamp(line.wall))
    made("span", "mark", summary, line.mark)
    made("b", "", summary, line.model)
    made("span", "words", summary, line.words)
    made("span", "process", summary, line.process)
    for (const text of line.details) made("div", "detail", node, text)
    return node
  }

  function drawLines() {
    const all = JSON.parse(model.lines)
    const shown = all.filter(({kinds, model: name, words: text, process, details}) =>
      (!chosen.size || kinds.some((kind) => chosen.has(kind))) && matches(`${name} ${text} ${process} ${details.join(" ")}`))
    const wanted = new Set(shown.map(({key}) => key))
    for (const [key, node] of known) {
      if (!wanted.has(key)) { node.remove(); known.delete(key) }
    }
    shown.forEach((line, n) => {
      if (!known.has(line.key)) known.set(line.key, makeLine(line))
      const node = known.get(line.key)
      if (list.children[n] !== node) list.insertBefore(node, list.children[n] ?? null)
    })
    empty.textContent = all.length ? "No event matches these words and kinds." : "Nothing happened in this time."
    empty.hidden = shown.length > 0
  }

  for (const kind of model.kinds) {
    const chip = made("button", "chip", chips, kind)
    const show = () => chip.setAttribute("aria-pressed", String(chosen.has(kind)))
    chip.onclick = () => {
      if (!chosen.delete(kind)) chosen.add(kind)
      keep("kinds", [...chosen].join(" "))
      show()
      drawLines()
    }
    show()
  }
  search.oninput = () => { keep("words", search.value); draw(); drawLines() }
  const watching = new ResizeObserver(() => { if (area.clientWidth !== Number(area.firstChild?.getAttribute?.("width"))) draw() })
  watching.observe(area)
  model.on("remove", () => watching.disconnect())
  model.on("drawing", draw)
  model.on("lines", drawLines)
  draw()
  drawLines()
  return root
}
