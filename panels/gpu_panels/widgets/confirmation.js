// The dialog's text and its two buttons. Cancel has the focus, so Enter cancels. Escape and a click beside the dialog
// cancel too. The answer has the number of its question, so a late click cannot answer another question.
export function render({model, el}) {
  const root = document.createElement("div")
  root.className = "confirmation"
  const lines = document.createElement("div")
  lines.id = "lines"
  for (const line of model.lines) {
    const paragraph = document.createElement("p")
    paragraph.textContent = line
    lines.append(paragraph)
  }
  const answers = document.createElement("div")
  answers.className = "answers"
  const addButton = (label, kind, answer) => {
    const button = document.createElement("button")
    button.textContent = label
    button.className = kind
    button.onclick = () => model.send_msg({answer, question: model.question})
    answers.append(button)
    return button
  }
  const cancel = addButton("Cancel", "no", "cancel")
  addButton(model.confirm, model.grave ? "yes grave" : "yes", "confirm")
  cancel.setAttribute("aria-describedby", "lines")  // a screen reader reads the text, as Cancel has the focus
  root.append(lines, answers)
  // The dialog takes the focus for itself while it opens, so Cancel takes it back a few times.
  for (const wait of [0, 60, 150, 300, 600]) {
    setTimeout(() => { if (!root.contains(root.getRootNode().activeElement)) cancel.focus() }, wait)
  }
  // When the dialog has closed, the button that opened it has the focus again. Material restores the focus only outside
  // of shadow roots.
  let wasOpen = false
  const watching = setInterval(() => {
    wasOpen ||= root.isConnected
    if (!wasOpen || root.isConnected) return
    clearInterval(watching)
    if (window.gpuOpener?.isConnected) window.gpuOpener.focus()
    window.gpuOpener = undefined
  }, 100)
  return root
}
