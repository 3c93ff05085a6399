// Shows the HTML of prose.py, including HTML that was set before the component is drawn.
export function render({model}) {
  const root = document.createElement("div")
  root.className = "prose"
  const draw = () => { root.innerHTML = model.html }  // escaped by the Python code that made it
  draw()
  model.on("html", draw)
  return root
}
