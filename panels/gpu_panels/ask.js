// What the dialog asks, and its two buttons. Cancel is where the focus is, so Enter is a no; so are Escape and a click
// beside the dialog. The answer names the question: a late click answers no other one.
export function render({model, el}) {
  const root = document.createElement("div")
  root.className = "ask"
  for (const line of model.lines) {
    const said = document.createElement("p")
    said.textContent = line
    root.append(said)
  }
  const answers = document.createElement("div")
  answers.className = "answers"
  const button = (label, kind, answer) => {
    const made = document.createElement("button")
    made.textContent = label
    made.className = kind
    made.onclick = () => model.send_msg({answer, question: model.question})
    answers.append(made)
    return made
  }
  const no = button("Cancel", "no", "cancel")
  button(model.confirm, model.grave ? "yes grave" : "yes", "confirm")
  root.append(answers)
  // The dialog takes the focus for itself as it opens; whoever opens it wants it here.
  for (const wait of [0, 60, 150, 300, 600]) {
    setTimeout(() => { if (!root.contains(root.getRootNode().activeElement)) no.focus() }, wait)
  }
  return root
}
