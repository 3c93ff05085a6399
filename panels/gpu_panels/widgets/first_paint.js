// Draws the preview of console.py with the scripts of the live page, and removes it once the live page is drawn.
// The shadow root is closed, so a script that looks for a part of the page finds the live part.
(({bar, problems, tabs, front, parts}, widgets) => {
  const dark = widgets.StatusBar.wantsDark()
  const host = document.getElementById("preview")
  host.className = dark ? "dark" : "light"
  const ends = []

  function draw({kind, values, margin}, parent) {
    const around = parent.appendChild(document.createElement("div"))
    around.style.margin = margin
    const node = around.appendChild(document.createElement("div"))
    const shadow = node.attachShadow({mode: "closed"})
    const style = document.createElement("style")
    style.textContent = widgets[kind].style
    const model = {...values, on: (event, act) => { if (event === "remove") ends.push(act) }, send_msg: () => {}}
    shadow.append(style, widgets[kind].render({model}))
  }

  const [top, above, line, body] = ["header", "div", "nav", "main"].map((tag) => host.appendChild(document.createElement(tag)))
  for (const title of tabs) {
    const tab = line.appendChild(document.createElement("span"))
    tab.textContent = title
    tab.className = title === front ? "front" : ""
  }
  draw(bar, top)
  for (const piece of problems) draw(piece, above)
  for (const piece of parts) draw(piece, body)
  const looking = setInterval(() => {
    const isDrawn = window.Bokeh?.index?.roots?.[0]?.is_idle
    const hasTheme = getComputedStyle(document.body).backgroundColor === getComputedStyle(host).backgroundColor
    if (!isDrawn || !hasTheme) return
    clearInterval(looking)
    requestAnimationFrame(() => requestAnimationFrame(() => {
      for (const end of ends) end()
      host.remove()
    }))
  }, 50)
})
