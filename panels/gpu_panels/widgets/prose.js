// Shows the HTML of prose.py, also what came before it was drawn.
export function render({model}) {
  const root = document.createElement("div")
  root.className = "prose"
  const draw = () => { root.innerHTML = model.html }  // escaped where it was made
  draw()
  model.on("html", draw)
  return root
}
