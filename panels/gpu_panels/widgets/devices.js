// Draws the rows of devices.py. All texts are set as text, never as HTML. An element is kept as long as its part is
// shown, so that an update neither closes a menu nor moves the focus.

function made(tag, kind, parent) {
  const node = document.createElement(tag)
  if (kind) node.className = kind
  if (parent) parent.append(node)
  return node
}

function say(node, text) {
  if (node.textContent !== text) node.textContent = text
}

function svg(tag, attributes, parent) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag)
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value)
  parent.append(node)
  return node
}

// Keeps the children of `parent` equal to `items`, in their order. `make(item)` makes a node, `fill(node, item)` updates it.
function keyed(parent, known, items, make, fill) {
  const wanted = new Set(items.map((item) => item.key ?? item.id))
  for (const [key, node] of known) {
    if (!wanted.has(key)) { node.remove(); known.delete(key) }
  }
  items.forEach((item, n) => {
    const key = item.key ?? item.id
    if (!known.has(key)) known.set(key, make(item))
    const node = known.get(key)
    if (parent.children[n] !== node) parent.insertBefore(node, parent.children[n] ?? null)
    const text = JSON.stringify(item)
    if (node.drawn !== text) { node.drawn = text; fill(node, item) }
  })
}

export function render({model}) {
  const root = made("div", "rack")  // Panel gives the element around it the class `devices`
  const body = made("div", "body", root)  // the layout follows its width; a menu inside it could not be fixed
  const head = made("div", "row titles", body)
  head.setAttribute("aria-hidden", "true")
  const list = made("div", "list", body)
  list.setAttribute("role", "list")
  const rows = new Map()
  let data = {ticks: [], rows: []}
  let menu = null  // the open menu: {opener, row id, part key, node}

  function titles() {
    head.replaceChildren()
    made("span", "name", head).textContent = "Device"
    const axis = made("span", "axis", head)
    for (const [at, text] of data.ticks) {
      const tick = made("span", "tick", axis)
      tick.style.left = `${at}%`
      tick.textContent = text
    }
    made("span", "free", head).textContent = "Free"
    made("span", "figure", head).textContent = "Busy"
    made("span", "figure", head).textContent = "Temp"
    made("span", "past", head).textContent = model.past_title
    made("span", "more", head)
  }

  function makeRow() {
    const row = made("div", "row")
    row.setAttribute("role", "listitem")
    const name = made("span", "name", row)
    row.id_ = made("b", "", name)
    name.append(" ")  // here a card's narrow row is broken
    row.level = made("span", "level", name)
    row.sub = made("span", "sub", name)
    row.bar = made("div", "bar", row)
    row.whole = made("span", "whole", row.bar)
    row.budget = made("span", "budget", row.bar)
    row.parts = made("div", "parts", row.bar)
    row.known = new Map()
    row.free = made("span", "free", row)
    row.free1 = made("b", "", row.free)
    row.free2 = made("span", "sub", row.free)
    row.lift = made("button", "act lift", row.free)
    row.lift.onclick = () => {
      window.gpuOpener = row.lift
      model.send_msg({verb: "undrain", id: `/${row.now.id}`})
    }
    row.busy = made("span", "figure busy", row)
    row.heat = made("span", "figure heat", row)
    row.past = made("span", "past", row)
    row.more = made("button", "more", row)
    row.more.textContent = "⋯"
    row.more.setAttribute("aria-haspopup", "true")
    row.more.onclick = () => toggle(row.more, row.now.id, null)
    return row
  }

  function fillRow(row, now) {
    row.now = now
    say(row.id_, now.title)
    say(row.sub, now.notice || now.name)
    row.sub.title = [now.notice, now.name].filter(Boolean).join("\n")
    row.sub.classList.toggle("notice", Boolean(now.notice))
    const lift = now.buttons.find(([verb]) => verb === "undrain")
    row.lift.hidden = !lift
    say(row.lift, lift ? lift[1] : "")
    row.lift.setAttribute("aria-label", lift ? `${lift[1]}: ${now.title}` : "")
    say(row.level, now.level)
    row.level.title = now.level_hint
    row.level.dataset.level = now.level
    row.classList.toggle("drained", now.is_drained)
    row.classList.toggle("over", now.is_over)
    row.bar.setAttribute("role", "group")
    row.bar.setAttribute("aria-label", now.description)
    row.whole.style.width = `${now.length}%`
    row.budget.style.left = `${now.limit}%`
    row.budget.title = now.limit_hint
    say(row.free1, now.free)
    say(row.free2, now.facts)
    row.free1.title = row.free2.title = `${now.free} · ${now.facts}`
    say(row.busy, now.busy)
    row.busy.title = now.busy && `The card was busy for ${now.busy} of the time`
    say(row.heat, now.celsius)
    row.heat.title = [now.celsius, now.watts].filter(Boolean).join(", ")
    row.more.setAttribute("aria-label", `${now.title}: all that it holds, and actions`)
    keyed(row.parts, row.known, now.parts, () => makePart(row), fillPart)
  }

  function makePart(row) {
    const node = made("button", "part")
    node.label = made("span", "label", node)
    node.onclick = () => toggle(node, row.now.id, node.shown.key)
    return node
  }

  function fillPart(node, part) {
    node.shown = part
    node.className = `part ${part.kind} ${{".": "dots", "-": "stripes"}[part.texture] ?? ""}`
    node.style.left = `${part.left}%`
    node.style.width = `${part.width}%`
    node.style.setProperty("--fill", part.colour || "transparent")
    const words = part.notebook ? `${part.title} · ${part.notebook}` : part.title
    say(node.label, words)
    node.title = `${words}\n${part.lines}`
    node.setAttribute("aria-label", `${words}, ${part.lines.split("\n").join(", ")}`)
    node.setAttribute("aria-haspopup", "true")
  }

  function drawPast() {
    const past = JSON.parse(model.past)
    for (const [id, row] of rows) {
      const seen = past[id]
      const text = JSON.stringify(seen ?? null)
      if (row.past.drawn === text) continue
      row.past.drawn = text
      row.past.replaceChildren()
      if (!seen) continue
      const words = `${model.past_title}: ${seen.words}`
      const picture = svg("svg", {viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": words}, row.past)
      row.past.title = words
      for (const [start, end, height] of seen.spans) {
        svg("rect", {x: start, y: 100 - height, width: end - start, height, class: "used"}, picture)
      }
      svg("line", {x1: 0, x2: 100, y1: 100 - seen.limit, y2: 100 - seen.limit, class: "limit"}, picture)
      for (const at of seen.marks) svg("line", {x1: at, x2: at, y1: 0, y2: 22, class: "evicted"}, picture)
    }
  }

  // -- the menu of a row or of a part

  function toggle(opener, id, key) {
    const again = menu?.opener === opener
    close()
    if (again) return
    menu = {opener, id, key, node: made("div", "menu", root)}
    menu.node.setAttribute("role", "dialog")
    opener.setAttribute("aria-expanded", "true")
    drawMenu()
    place()
    const first = menu.node.querySelector("button:enabled")
    if (first) first.focus()
  }

  function close(focus) {
    if (!menu) return
    const {opener, node} = menu
    node.remove()
    opener.removeAttribute("aria-expanded")
    menu = null
    if (focus) opener.focus()
  }

  function place() {  // a narrow page has the menu at its bottom; see devices.css
    const at = menu.opener.getBoundingClientRect()
    const {offsetWidth: width, offsetHeight: height} = menu.node
    const below = at.bottom + height + 4 < window.innerHeight
    menu.node.style.left = `${Math.max(4, Math.min(at.left, window.innerWidth - width - 4))}px`
    menu.node.style.top = `${below ? at.bottom + 2 : Math.max(4, at.top - height - 2)}px`
  }

  function drawMenu() {
    const row = data.rows.find(({id}) => id === menu.id)
    const part = row?.parts.find(({key}) => key === menu.key)
    if (!row || (menu.key && !part)) return close(true)
    const text = JSON.stringify(part ?? row)
    if (menu.drawn === text) return
    menu.drawn = text
    const focused = menu.node.getRootNode().activeElement?.dataset?.press
    menu.node.replaceChildren()
    const title = part ? words(part) : `${row.title} · ${row.name}`
    menu.node.setAttribute("aria-label", title)
    made("div", "title", menu.node).textContent = title
    if (part) {
      for (const line of part.lines.split("\n").filter(Boolean)) made("div", "line", menu.node).textContent = line
      addButtons(part.buttons, part.id, menu.node, part.title)
    } else {
      for (const line of [row.notice, `${row.free} · ${row.facts}`, row.limit_hint, row.watts && `${row.watts} drawn`]) {
        if (line) made("div", "line", menu.node).textContent = line
      }
      addButtons(row.buttons, `/${row.id}`, menu.node, row.title)
      for (const one of row.parts) {
        const item = made("div", `item ${one.kind}`, menu.node)
        const swatch = made("span", `swatch ${{".": "dots", "-": "stripes"}[one.texture] ?? ""}`, item)
        swatch.style.setProperty("--fill", one.colour || "transparent")
        made("span", "words", item).textContent = `${words(one)} · ${one.lines.split("\n")[0]}`
        addButtons(one.buttons, one.id, item, one.title)
      }
    }
    const button = focused && [...menu.node.querySelectorAll("button")].find((one) => one.dataset.press === focused)
    if (button) button.focus()
  }

  function words(part) {
    return part.notebook ? `${part.title} · ${part.notebook}` : part.title
  }

  function addButtons(buttons, id, parent, what) {
    if (!buttons.length) return
    const line = made("div", "actions", parent)
    for (const [verb, label, why_not] of buttons) {
      const button = made("button", "act", line)
      button.textContent = label
      button.disabled = Boolean(why_not)
      button.title = why_not || model.means[verb.split(" ")[0]] || `${label}: ${what}`
      button.setAttribute("aria-label", why_not ? `${label}: ${what}. ${why_not}` : `${label}: ${what}`)
      button.dataset.press = `${verb} ${id}`
      button.onclick = () => {
        window.gpuOpener = menu.opener  // gets the focus back when the dialog closes; see confirmation.js
        close(true)
        model.send_msg({verb, id})
      }
    }
  }

  root.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && menu) { close(true); event.stopPropagation() }
  })
  const outside = (event) => { if (menu && !event.composedPath().includes(menu.node) && !event.composedPath().includes(menu.opener)) close() }
  document.addEventListener("pointerdown", outside, true)
  const moved = (event) => { if (menu && !menu.node.contains(event.target)) place() }
  document.addEventListener("scroll", moved, true)
  model.on("remove", () => {
    document.removeEventListener("pointerdown", outside, true)
    document.removeEventListener("scroll", moved, true)
  })

  function draw() {
    data = JSON.parse(model.rows)
    titles()
    head.hidden = !data.rows.length
    keyed(list, rows, data.rows, makeRow, fillRow)
    root.classList.toggle("measured", data.rows.some(({busy, celsius}) => busy || celsius))
    root.classList.toggle("recorded", Boolean(model.past_title))
    drawPast()
    if (menu) drawMenu()
  }

  draw()
  model.on("rows", draw)
  model.on("past", drawPast)
  return root
}
