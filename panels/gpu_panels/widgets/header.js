// The status bar shows what the server sent, and for how long the server has sent nothing. The browser's clock measures
// that time, so it is also shown when the server is gone or the kernel is busy with a long cell.
const QUIET_SECONDS = 4

// A notebook's page must get no message before Bokeh has the page in its index. Until then Panel drops single parts of
// messages, and every later message fails.
function settled(view) {
  const roots = view.model.document?.roots() ?? []
  return roots.some(({id}) => id in (window.PyViz?.plot_index ?? {}) || id in (window.Bokeh?.index ?? {}))
}

// In a tab of JupyterLab the page has JupyterLab's theme. Elsewhere the theme is the one that was chosen in this browser,
// else the system's theme. Only a choice that differs from the
// system's theme is stored. So a user who chooses the system's theme follows the system again.
const CHOSEN = "gpu-console-theme"
const SYSTEM = window.matchMedia("(prefers-color-scheme: dark)")

const LAB = labBody()

function labBody() {  // null outside JupyterLab
  try {
    const body = window.parent === window ? null : window.parent.document.body
    return body?.dataset.jpThemeLight ? body : null
  } catch {  // a frame in a page of another host
    return null
  }
}

function stored(dark) {  // without storage the browser only forgets the choice
  try {
    if (dark === undefined) return localStorage.getItem(CHOSEN)
    if (dark === SYSTEM.matches) localStorage.removeItem(CHOSEN)
    else localStorage.setItem(CHOSEN, dark ? "dark" : "light")
  } catch { }
  return null
}

export function wantsDark() {
  return LAB ? LAB.dataset.jpThemeLight === "false" : {dark: true, light: false}[stored()] ?? SYSTEM.matches
}

function follow(report, shown) {
  if (wantsDark() !== shown) report(wantsDark())
  if (LAB) new MutationObserver(() => report(wantsDark())).observe(LAB, {attributeFilter: ["data-jp-theme-light"]})
  else SYSTEM.onchange = () => report(wantsDark())
}

// The part of the URL that the server knows; a table and the timeline keep theirs under other names.
const IN_ADDRESS = ["tab", "range", "span", "model", "size", "cards", "layout", "importance"]

function showAddress(query) {
  const url = new URL(location.href)
  for (const name of IN_ADDRESS) url.searchParams.delete(name)
  for (const [name, value] of new URLSearchParams(query)) url.searchParams.set(name, value)
  if (url.href !== location.href) history.replaceState(history.state, "", url)
}

// The elements of the page below the status bar, also inside of shadow roots.
function contents(root) {
  for (const node of root.querySelectorAll("*")) {
    if (node.localName === "main") return node
    const found = node.shadowRoot && contents(node.shadowRoot)
    if (found) return found
  }
}

async function reconnect(button) {
  button.disabled = true
  try {
    await fetch(location.href, {method: "HEAD", cache: "no-store"})
    location.reload()
  } catch {  // a reload now would replace the last figures by the browser's error page
    button.textContent = "No answer. Try again"
  }
  button.disabled = false
}

export function render({model, view}) {
  const root = document.createElement("div")
  root.className = "status-bar"
  const words = document.createElement("div")
  words.className = "words"
  const fresh = document.createElement("div")
  fresh.className = "fresh"
  // Screen readers speak of each change here: of problems and of silence, and not of each new second.
  const spoken = document.createElement("div")
  spoken.className = "spoken"
  spoken.setAttribute("role", "status")
  const again = document.createElement("button")
  again.className = "again"
  again.textContent = "Reconnect"
  again.hidden = true
  again.onclick = () => reconnect(again)
  root.append(words, fresh, again, spoken)
  let lastUpdate = Date.now()

  function showAge() {
    const quiet = Math.round((Date.now() - lastUpdate) / 1000)
    const late = quiet >= QUIET_SECONDS
    const text = late ? `${model.silence} for ${quiet} s; figures as of ${model.as_of}` : `as of ${model.as_of}`
    if (fresh.textContent !== text) fresh.textContent = text
    fresh.classList.toggle("late", late)
    const news = late ? model.silence : words.querySelector(".problems")?.textContent ?? ""
    if (spoken.textContent !== news) spoken.textContent = news
    if (!model.chooses || again.hidden === !late) return
    again.hidden = !late
    const figures = contents(document)
    if (figures) figures.style.filter = late ? "grayscale(1) opacity(.55)" : ""
  }

  function draw() {
    words.innerHTML = model.words  // the code that made it has escaped all names
  }

  // The browser draws scroll bars and the calendar of a time field for this scheme.
  const showScheme = () => { document.documentElement.style.colorScheme = model.dark ? "dark" : "light" }

  if (model.chooses) {
    document.documentElement.dataset.gpuConsole = "served"
    model.on("address", () => showAddress(model.address))
    model.on("dark", showScheme)
    showScheme()
  }
  draw()
  showAge()
  model.on("words", draw)
  model.on("beat", () => { lastUpdate = Date.now(); showAge() })
  if (model.chooses) {
    follow((dark) => model.send_msg(dark ? "dark" : "light"), model.dark)
    if (!LAB) model.on("dark", () => stored(model.dark))
  }
  const ticking = setInterval(showAge, 1000)
  const announcing = model.announces && setInterval(() => {
    if (settled(view)) {
      clearInterval(announcing)
      model.send_msg("ready")
    }
  }, 100)
  model.on("remove", () => { clearInterval(ticking); clearInterval(announcing) })
  return root
}
