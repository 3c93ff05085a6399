// Shows the HTML of the widget Prose, including HTML that was set before the component is drawn.
export function render({model}) {
  const root = document.createElement("div")
  root.className = "prose"
  function draw() {
    if (root.querySelector("a:active")) {  // a link that is replaced while it is pressed gets no click
      setTimeout(draw, 200)
      return
    }
    const focused = root.getRootNode().activeElement?.getAttribute("href")
    root.innerHTML = model.html  // escaped by the Python code that made it
    if (focused) [...root.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus()
  }
  draw()
  model.on("html", draw)
  return root
}
