// The strip at the top: what the server says, and since when nothing was heard of it. The browser's own clock tells that,
// so it is told too when the server is gone, or the kernel is busy with a long cell.
const QUIET_SECONDS = 4

// A notebook's page is told nothing before Bokeh has it in its index: until then Panel drops single parts of messages, and
// no later one is understood.
function settled(view) {
  const roots = view.model.document?.roots() ?? []
  return roots.some(({id}) => id in (window.PyViz?.plot_index ?? {}) || id in (window.Bokeh?.index ?? {}))
}

// The theme: the one that was chosen in this browser, else the system's. Only a choice that differs from the system's is
// kept, so whoever goes back to it follows it again.
const CHOSEN = "gpu-console-theme"
const SYSTEM = window.matchMedia("(prefers-color-scheme: dark)")

function stored(dark) {  // a browser that keeps nothing forgets the choice, and no more
  try {
    if (dark === undefined) return localStorage.getItem(CHOSEN)
    if (dark === SYSTEM.matches) localStorage.removeItem(CHOSEN)
    else localStorage.setItem(CHOSEN, dark ? "dark" : "light")
  } catch { }
  return null
}

function follow(tell, shown) {
  const wanted = () => ({dark: true, light: false}[stored()] ?? SYSTEM.matches)
  if (wanted() !== shown) tell(wanted())
  SYSTEM.onchange = () => tell(wanted())
}

export function render({model, view}) {
  const root = document.createElement("div")
  root.className = "strip"
  const words = document.createElement("div")
  words.className = "words"
  const fresh = document.createElement("div")
  fresh.className = "fresh"
  fresh.setAttribute("role", "status")
  root.append(words, fresh)
  let heard = Date.now()

  function tell() {
    const quiet = Math.round((Date.now() - heard) / 1000)
    const late = quiet >= QUIET_SECONDS
    const said = late ? `${model.silence} for ${quiet} s; as of ${model.as_of}` : `as of ${model.as_of}`
    if (fresh.textContent !== said) fresh.textContent = said
    fresh.classList.toggle("late", late)
  }

  function draw() {
    words.innerHTML = model.words  // escaped where it was made: header.py
  }

  draw()
  tell()
  model.on("words", draw)
  model.on("beat", () => { heard = Date.now(); tell() })
  if (model.chooses) {
    follow((dark) => model.send_msg(dark ? "dark" : "light"), model.dark)
    model.on("dark", () => stored(model.dark))
  }
  const ticking = setInterval(tell, 1000)
  const announcing = model.announces && setInterval(() => {
    if (settled(view)) {
      clearInterval(announcing)
      model.send_msg("ready")
    }
  }, 100)
  model.on("remove", () => { clearInterval(ticking); clearInterval(announcing) })
  return root
}
