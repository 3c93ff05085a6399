// GPU memory in JupyterLab and Notebook 7: a status-bar item and a side panel.
//
// This file is a module-federation container written by hand, so there is no build step. It uses only modules that
// JupyterLab 4.2 and newer share. The server decides all words and figures (gpu_panels/lab/view.py); this file draws
// them. Text from the server becomes text nodes only, never HTML.
(() => {
  const NAME = 'gpu-console'
  const PANEL = 'gpu-console-panel'
  const POLL_MS = 2000 // between two polls of the page that the user works in
  const QUIET_MS = 5000 // of another visible page, or if nothing has changed for QUIET_POLLS polls; a hidden page does not poll
  const QUIET_POLLS = 15
  const MOST_PAUSE_MS = 60000 // after errors
  const DONE_MS = 20000 // how long a successful action, and an alert, is shown
  const TOLD_MS = 600000 // an alert that was gone for less is not shown again, such as of a card that fills and empties all the time
  const SEEN = 'gpu-console-alerts' // the key in the browser's storage
  const LEDGER = 'A ledger is the list in which notebooks agree who holds how much of a card.'

  const ICON = `<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16" viewBox="0 0 24 24">
    <path class="jp-icon3" fill="#616161" fill-rule="evenodd" d="M2 5h2v1h17a1 1 0 0 1 1 1v9a1 1 0 0 1-1 1h-5v2H7v-2H4v3H2zm9 3a3.5 3.5 0 1
    0 0 7 3.5 3.5 0 0 0 0-7zm6 1v5h2V9z"/></svg>`

  const STYLE = `
.gpu-status { display: flex; align-items: center; gap: 6px; height: 100%; padding: 0 8px; border: 0; background: none; color: inherit;
  font: inherit; font-variant-numeric: tabular-nums; white-space: nowrap; cursor: pointer; }
.gpu-status:hover { background: var(--jp-layout-color3); }
.gpu-status.gpu-off { opacity: .55; }
.gpu-problem::before { content: ''; flex: none; width: 8px; height: 8px; border-radius: 50%; background: #e8710a; }
.gpu-panel { display: flex; flex-direction: column; overflow: auto; min-width: 160px; padding: 0 0 12px; background: var(--jp-layout-color1);
  color: var(--jp-ui-font-color1); font-size: var(--jp-ui-font-size1); font-family: var(--jp-ui-font-family); line-height: 1.4; }
.gpu-panel h2, .gpu-panel h3 { margin: 0; font-size: inherit; font-weight: 600; overflow-wrap: anywhere; }
.gpu-panel p { margin: 4px 0; overflow-wrap: anywhere; }
.gpu-soft { color: var(--jp-ui-font-color2); font-size: var(--jp-ui-font-size0); font-weight: 400; }
.gpu-size { margin-left: auto; white-space: nowrap; font-variant-numeric: tabular-nums; }
.gpu-block { padding: 8px 12px; border-bottom: 1px solid var(--jp-border-color2); }
.gpu-line { display: flex; align-items: baseline; column-gap: 8px; }
.gpu-line > :first-child { min-width: 0; overflow-wrap: anywhere; }
.gpu-line > .gpu-soft, .gpu-line > .gpu-card { flex: none; }
.gpu-fill { margin-left: auto; text-align: right; font-variant-numeric: tabular-nums; }
.gpu-figures { margin: -3px 0 6px; overflow-wrap: anywhere; }
.gpu-row { padding: 4px 0 4px 10px; border-left: 2px solid var(--jp-border-color2); margin: 6px 0; }
.gpu-bar { height: 6px; margin: 3px 0 6px; border-radius: 3px; background: var(--jp-layout-color3); overflow: hidden; }
.gpu-bar > div { height: 100%; background: var(--jp-ui-font-color3); }
.gpu-buttons { display: flex; flex-wrap: wrap; gap: 4px; margin-top: 4px; }
.gpu-panel .gpu-buttons button { min-height: 24px; padding: 2px 8px; border: 1px solid var(--jp-border-color1); border-radius: 2px; cursor: pointer;
  background: var(--jp-layout-color1); color: var(--jp-ui-font-color1); font: inherit; font-size: var(--jp-ui-font-size0); }
.gpu-panel .gpu-buttons button:hover { background: var(--jp-layout-color2); }
.gpu-panel .gpu-buttons button[aria-disabled=true] { color: var(--jp-ui-font-color3); cursor: default; background: none; }
.gpu-panel button:focus-visible, .gpu-status:focus-visible { outline: 2px solid var(--jp-brand-color1); outline-offset: -1px; }
.gpu-alarm { border-left: 3px solid #e8710a; padding-left: 8px; }
.gpu-note { border-left: 3px solid var(--jp-border-color1); padding-left: 8px; }
.gpu-trouble { display: inline-flex; align-items: center; gap: 4px; font-weight: 600; }
.gpu-variables { width: 100%; margin-top: 4px; border-collapse: collapse; font-size: var(--jp-ui-font-size0); }
.gpu-variables td { padding: 1px 6px 1px 0; vertical-align: top; overflow-wrap: anywhere; }
.gpu-variables td:last-child { text-align: right; white-space: nowrap; padding-right: 0; }
.gpu-dialog p { margin: 0 0 8px; max-width: 460px; overflow-wrap: anywhere; }`

  let scope

  // The module `name` of JupyterLab itself. Another extension may share a second version of it, whose tokens differ.
  async function shared(name) {
    const versions = Object.values(scope[name] ?? {})
    const own = versions.filter(one => /^@jupyterlab\/application|^@jupyter-notebook\//.test(one.from ?? ''))
    const found = own.at(-1) ?? versions.find(one => one.loaded) ?? versions.at(-1)
    if (!found) throw new Error(`${name} is not shared by this page`)
    return (await found.get())()
  }

  // An element with attributes and children. Texts become text nodes; a property that begins with `on` is a listener.
  function make(tag, given = {}, ...children) {
    const made = document.createElement(tag)
    for (const [name, value] of Object.entries(given)) {
      if (name.startsWith('on')) made.addEventListener(name.slice(2), value)
      else if (value !== undefined && value !== null && value !== '') made.setAttribute(name, value)
    }
    made.append(...children.filter(child => child !== null && child !== undefined && child !== ''))
    return made
  }

  function duration(since) {
    const seconds = Math.max(0, Math.round(Date.now() / 1000 - since))
    if (seconds < 5) return 'less than 5 s'
    if (seconds < 60) return `${5 * Math.floor(seconds / 5)} s`
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min`
    if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds / 60) % 60} min`
    return `${Math.floor(seconds / 86400)} d`
  }

  function clock(since) {
    return new Date(1000 * since).toLocaleTimeString([], {hour: '2-digit', minute: '2-digit', hourCycle: 'h23'})
  }

  // A text with a duration, which `tick` keeps up to date.
  function began(found) {
    return found.before ? `since before ${clock(found.since)}, over` : `since ${clock(found.since)},`
  }

  function lasting(words, since) {
    const made = make('span', {'data-since': since, 'data-words': words}, `${words} ${duration(since)}`)
    return made
  }

  function separated(parts) {
    return parts.filter(Boolean).flatMap((part, n) => (n ? [' · ', part] : [part]))
  }

  // Asks the server every few seconds while the page is visible. Calls `show(answer)` after a change, and `fail(words)`.
  class Poll {
    constructor(request, kernel, show, fail) {
      Object.assign(this, {request, kernel, show, fail, seen: '', same: 0, failures: 0, asked: undefined})
      document.addEventListener('visibilitychange', () => document.hidden || this.now())
      window.addEventListener('focus', () => this.now())
      this.now()
    }

    now() {
      clearTimeout(this.timer)
      this.again = this.running
      if (!this.running) this.round()
    }

    async round() {
      this.running = true
      const kernel = this.kernel() ?? ''
      if (kernel !== this.asked) this.seen = ''
      this.asked = kernel
      try {
        const found = await this.request(`status?kernel=${encodeURIComponent(kernel)}&seen=${this.seen}`)
        this.same = found ? 0 : this.same + 1
        this.failures = 0
        if (found) {
          this.seen = found.digest
          this.show(found.answer)
        }
      } catch (error) {
        this.failures += 1
        this.seen = ''
        this.fail(error.message)
      }
      this.running = false
      const again = this.again
      this.again = false
      if (again) return this.round()
      if (document.hidden) return // the next visibilitychange continues
      const quiet = this.same >= QUIET_POLLS || !document.hasFocus() ? QUIET_MS : POLL_MS
      this.timer = setTimeout(() => this.now(), Math.min(MOST_PAUSE_MS, quiet * 2 ** Math.min(this.failures, 6)))
    }
  }

  class Panel {
    // `node` is drawn into. `does` has the functions `confirm`, `request`, `open`, `interrupt` and `refresh`.
    constructor(node, does) {
      Object.assign(this, {node, does, answer: null, error: '', outcomes: [], variables: new Map()})
      this.outcomeNode = make('div', {role: 'status', 'aria-live': 'polite'})
      this.body = make('div')
      node.append(this.outcomeNode, this.body)
      setInterval(() => this.tick(), 5000)
    }

    show(answer, error) {
      this.answer = answer
      this.error = error
      this.draw()
    }

    tick() {
      for (const one of this.node.querySelectorAll('[data-since]')) {
        const text = `${one.dataset.words} ${duration(one.dataset.since)}`
        if (one.textContent !== text) one.textContent = text
      }
    }

    // Draws everything again. The focus stays on the button of the same name.
    draw() {
      const focused = this.body.contains(document.activeElement) ? document.activeElement.dataset.key : ''
      const scrolled = this.node.scrollTop
      this.body.replaceChildren(...this.parts())
      this.node.scrollTop = scrolled
      if (focused) [...this.body.querySelectorAll('button')].find(one => one.dataset.key === focused)?.focus()
    }

    parts() {
      const found = this.answer
      const alarm = words => make('p', {class: 'gpu-alarm'}, words)
      if (!found) return [make('div', {class: 'gpu-block'}, this.error ? alarm(this.error) : 'Reading …')]
      const problems = [...(this.error ? [alarm(this.error)] : []), ...found.problems.map(one => this.problem(one))]
      return [
        problems.length ? make('section', {class: 'gpu-block', 'aria-label': 'Problems'}, ...problems) : null,
        this.cards(found),
        found.waiting.length ? this.queue(found) : null,
        ...found.groups.map(group => this.group(group)),
        found.groups.length ? null : make('div', {class: 'gpu-block'}, make('p', {}, 'No process holds GPU memory.'),
          make('p', {class: 'gpu-soft'}, 'To load a model in a notebook: %gpu load NAME PATH')),
      ].filter(Boolean)
    }

    problem(found) {
      const buttons = found.actions.map(({verb, target, label, why_not}) => this.button(`problem ${target} ${verb}`, label,
        `${label}: ${found.text}`, () => this.act(verb, target, label), why_not, this.answer.means[verb]))
      return make('div', {class: 'gpu-alarm'}, make('p', {}, found.text), make('div', {class: 'gpu-soft'}, lasting(began(found), found.since)),
        buttons.length ? make('div', {class: 'gpu-buttons'}, ...buttons) : null)
    }

    cards(found) {
      const cards = found.devices.map(card => make('div', {},
        make('div', {class: 'gpu-line'}, make('span', {class: 'gpu-card'}, card.title), card.level ? make('span', {class: 'gpu-soft'}, card.level) : null,
          make('span', {class: 'gpu-fill'}, card.fill)),
        make('div', {class: 'gpu-bar', role: 'img', 'aria-label': `${card.title}: ${card.fill}`, title: card.name},
          make('div', {style: `width: ${100 * card.part}%`})),
        make('div', {class: 'gpu-soft gpu-figures', title: card.busy && 'busy · temperature'},
          separated([card.busy, card.pcie, card.drained && `drained by ${card.drained}`]).join(''))))
      const several = found.several && make('div', {class: 'gpu-note', title: LEDGER}, make('p', {},
        `${found.several}. The notebook in front uses ${found.ledger.title}. The GPU console shows ${found.tile}.`))
      return make('section', {class: 'gpu-block', 'aria-label': 'Devices'}, ...cards, several || null,
        make('div', {class: 'gpu-soft', title: LEDGER}, separated([found.simulated && 'simulated', `ledger ${found.ledger.title}`]).join('')),
        found.week ? make('div', {class: 'gpu-soft'}, found.week) : null)
    }

    queue(found) {
      const rows = found.waiting.map(one => make('div', {class: 'gpu-row'},
        make('div', {class: 'gpu-line'}, make('span', {}, one.name), make('span', {class: 'gpu-soft'}, lasting('for', one.since)),
          make('span', {class: 'gpu-size'}, one.need)),
        make('div', {class: 'gpu-soft'}, separated([one.holder, one.because]).join('')), this.waitButtons(one)))
      return make('section', {class: 'gpu-block'}, make('h2', {}, 'Waiting'), ...rows)
    }

    waitButtons(one) {
      const buttons = one.actions.map(action => this.button(`${one.id} ${action.verb}`, action.label, `${action.label} of ${one.name}: ${one.holder}`,
        () => this.act(action.verb, one.id, `${action.label} of ${one.name}`), action.why_not))
      if (one.path) buttons.push(this.button(`${one.id} open`, 'Open notebook', `Open notebook: ${one.holder}`, () => this.does.open(one.path)))
      return make('div', {class: 'gpu-buttons'}, ...buttons)
    }

    group(group) {
      const state = group.trouble ? make('span', {class: 'gpu-trouble gpu-problem'}, group.trouble)
        : group.waits ? lasting('waits', group.waits) : group.busy ? lasting('runs a cell,', group.busy) : group.idle ? lasting('idle', group.idle) : ''
      const buttons = []
      const button = (verb, label, act, whyNot) => buttons.push(this.button(`${group.id} ${verb}`, label, `${label}: ${group.title}`, act, whyNot))
      if (group.path) button('open', 'Open notebook', () => this.does.open(group.path))
      if (group.kernel) button('interrupt', 'Interrupt kernel', () => this.interrupt(group), group.why_not)
      return make('section', {class: 'gpu-block', 'aria-label': group.title},
        make('div', {class: 'gpu-line'}, make('h3', {title: group.path}, group.title), make('b', {class: 'gpu-size'}, group.bytes)),
        make('div', {class: 'gpu-soft'}, ...separated([state, group.pid && `pid ${group.pid}`, group.user])),
        buttons.length ? make('div', {class: 'gpu-buttons'}, ...buttons) : null,
        ...group.rows.map(row => this.row(group, row)))
    }

    row(group, row) {
      const buttons = row.actions.map(action => this.button(`${row.id} ${action.verb}`, action.label,
        `${action.label} ${row.name}: ${group.title}`, () => this.act(action.verb, row.id,
          `${action.label} ${row.variables ? group.title : row.name}`), action.why_not, this.answer.means[action.verb]))
      const known = this.variables.get(row.id)
      if (row.variables) {
        const made = this.button(`${row.id} variables`, 'Variables', `Variables of ${group.title}`, () => this.toggle(row, group))
        made.setAttribute('aria-expanded', Boolean(known))
        buttons.push(made)
      }
      return make('div', {class: 'gpu-row'},
        make('div', {class: 'gpu-line'}, make('span', {title: row.hint}, row.name), make('span', {class: 'gpu-size'}, row.bytes)),
        make('div', {class: 'gpu-soft'}, ...separated([row.where, row.state, row.idle && lasting('idle', row.idle)])),
        buttons.length ? make('div', {class: 'gpu-buttons'}, ...buttons) : null, known ? this.table(known) : null)
    }

    // A button that cannot be pressed can still be focused, and says why.
    button(key, label, name, act, whyNot = '', means = '') {
      return make('button', {type: 'button', 'data-key': key, 'aria-label': name, title: whyNot || means, 'aria-disabled': whyNot ? 'true' : '',
        onclick: () => whyNot ? this.report(label, 'failed', whyNot) : act()}, label)
    }

    table(known) {
      if (known.words) return make('p', {class: 'gpu-soft'}, known.words)
      const rows = known.rows.map(one => make('tr', {}, make('td', {title: one.kind}, one.name),
        make('td', {class: 'gpu-soft'}, one.cell || one.kind), make('td', {title: `frees ${one.frees} if deleted alone`}, one.bytes)))
      return make('div', {}, make('table', {class: 'gpu-variables'}, make('tbody', {}, ...rows)), known.note ? make('p', {class: 'gpu-soft'}, known.note) : null)
    }

    async toggle(row, group) {
      if (this.variables.delete(row.id)) return this.draw()
      this.variables.set(row.id, {words: `asking ${group.title} …`})
      this.draw()
      let known
      try {
        const found = await this.does.request(`variables?ledger=${this.answer.ledger.key}&owner=${encodeURIComponent(group.id)}`)
        known = found.answer.rows.length ? found.answer : {words: found.answer.note || 'No variable holds memory on a device.'}
      } catch (error) {
        known = {words: error.message}
      }
      if (this.variables.has(row.id)) this.variables.set(row.id, known)
      this.draw()
    }

    async act(verb, target, title) {
      await this.asked(verb, target, title, async (question, report) => {
        report('waiting', `waiting for ${question.process}`)
        const {done, because} = (await this.does.request('act', {question: question.question})).answer
        report(done ? 'done' : 'failed', because)
      })
    }

    async interrupt(group) {
      await this.asked('interrupt', `${group.id}/`, `Interrupt ${group.title}`, async (_, report) => {
        await this.does.interrupt(group.kernel)
        report('done', 'the kernel was interrupted')
      })
    }

    // Opens the dialog with the server's words, and calls `then` once it is confirmed.
    async asked(verb, target, title, then) {
      const report = (state, words) => this.report(title, state, words)
      try {
        const question = (await this.does.request('question', {ledger: this.answer.ledger.key, verb, target})).answer
        if (question.refused) return report('failed', question.refused)
        if (await this.does.confirm(question)) await then(question, report)
      } catch (error) {
        report('failed', error.message)
      }
      this.does.refresh()
    }

    // The outcome of an action: a line at the top that a screen reader speaks.
    report(title, state, words) {
      clearTimeout(this.forget)
      const mark = {waiting: '…', done: '✓', failed: '✗'}[state]
      const kind = state === 'failed' ? 'gpu-alarm' : 'gpu-note'
      this.outcomeNode.replaceChildren(make('div', {class: 'gpu-block'}, make('p', {class: kind}, `${mark} ${title}: ${words}`)))
      if (state === 'done') this.forget = setTimeout(() => this.outcomeNode.replaceChildren(), DONE_MS)
    }
  }

  async function plugins() {
    const optional = async (name, token) => {
      try { return (await shared(name))[token] } catch { return null } // this page has no such part
    }
    const tokens = [await optional('@jupyterlab/statusbar', 'IStatusBar'), await optional('@jupyterlab/notebook', 'INotebookTracker'),
      await optional('@jupyterlab/apputils', 'ICommandPalette'), await optional('@jupyterlab/settingregistry', 'ISettingRegistry'),
      await optional('@jupyterlab/running', 'IRunningSessionManagers')]
    const known = tokens.filter(Boolean)
    const activate = async (app, ...given) => {
      try {
        await start(app, ...tokens.map(token => token && given[known.indexOf(token)]))
      } catch (error) {
        console.warn('GPU console:', error) // JupyterLab works without this extension
      }
    }
    return [{id: `${NAME}:memory`, description: 'GPU memory in the status bar and a side panel.', autoStart: true, optional: known, activate}]
  }

  // Shows in the list of running kernels what each holds, beside its notebooks if it has some. Returns a function that takes
  // the groups of an answer.
  function besideKernels(running) {
    const held = new Map() // the id of a kernel -> a text
    const marked = item => {
      const rows = item.children?.map(marked)
      const text = held.get(item.context)
      // The list of JupyterLab 4.2 and 4.3 is the tree, of which it hides the rows of kernels with a notebook.
      if (text && rows?.length) Object.defineProperty(item, 'children', {value: rows, configurable: true})
      else if (text) item.detail = () => text
      return item
    }
    const wrap = manager => {
      const plain = manager.running.bind(manager)
      manager.running = options => plain(options).map(marked)
    }
    running.items().forEach(wrap)
    running.added.connect((_, manager) => wrap(manager))
    return groups => {
      const now = new Map(groups.filter(one => one.kernel).map(one => [one.kernel, one.bytes]))
      if (JSON.stringify([...now]) === JSON.stringify([...held])) return
      const known = new Set([...now.keys(), ...held.keys()])
      held.clear()
      now.forEach((text, id) => held.set(id, text))
      const changed = item => known.has(item.context) || item.children?.some(changed)
      for (const manager of running.items()) // only the list of kernels is drawn again
        if (manager.running({mode: 'list'}).some(changed)) manager.runningChanged.emit(undefined)
    }
  }

  async function start(app, bar, tracker, palette, registry, running) {
    const [{ServerConnection}, {Widget}, {Dialog, Notification, showDialog}, {LabIcon}] = await Promise.all(
      ['@jupyterlab/services', '@lumino/widgets', '@jupyterlab/apputils', '@jupyterlab/ui-components'].map(shared))
    const settings = app.serviceManager.serverSettings

    async function send(path, body) {
      const init = body === undefined ? {} : {method: 'POST', body: JSON.stringify(body)}
      return ServerConnection.makeRequest(settings.baseUrl + path, init, settings)
    }

    async function request(path, body) {
      const response = await send(`api/gpu-console/${path}`, body)
      if (response.status === 204) return null
      const answer = await response.json().catch(() => ({}))
      if (!response.ok) throw new Error(answer.error || answer.message || `the server answered ${response.status}`)
      return {answer, digest: response.headers.get('X-GPU-Digest') ?? ''}
    }

    async function confirm({title, lines, confirm, grave}) {
      const body = new Widget({node: make('div', {class: 'gpu-dialog'}, ...lines.map(line => make('p', {}, line)))})
      const yes = (grave ? Dialog.warnButton : Dialog.okButton)({label: confirm})
      return (await showDialog({title, body, buttons: [Dialog.cancelButton(), yes], defaultButton: 0})).button.accept
    }

    async function interrupt(kernel) {
      const response = await send(`api/kernels/${encodeURIComponent(kernel)}/interrupt`, {})
      if (!response.ok) throw new Error(`the server answered ${response.status}`)
    }

    document.head.append(make('style', {'data-name': NAME}, STYLE))
    const widget = new Widget()
    widget.id = PANEL
    widget.addClass('gpu-panel')
    widget.title.caption = 'GPU memory'
    widget.title.icon = new LabIcon({name: `${NAME}:card`, svgstr: ICON})
    widget.node.setAttribute('role', 'region')
    widget.node.setAttribute('aria-label', 'GPU memory')
    app.shell.add(widget, 'left', {rank: 850})

    const open = path => app.commands.execute('docmanager:open', {path})
    const reveal = () => app.shell.activateById(PANEL)
    const panel = new Panel(widget.node, {request, confirm, interrupt, open, refresh: () => poll.now()})
    app.commands.addCommand(`${NAME}:show`, {label: 'Show GPU Memory', execute: reveal})
    palette?.addItem({command: `${NAME}:show`, category: 'GPU'})

    const text = make('span')
    const status = make('button', {class: 'gpu-status', type: 'button', onclick: reveal}, text)
    // The user's settings (schemas/gpu-console/memory.json); a page without a registry has the defaults.
    const chosen = {show: 'cards', alertPercent: 0, alertWaitSeconds: 0}
    const item = new Widget({node: make('div')})
    item.node.append(status)
    item.hide()
    if (bar) bar.registerStatusItem(`${NAME}:memory`, {item, align: 'left', rank: 90, isActive: () => chosen.show !== 'nothing'})
    else app.shell.add(Object.assign(item, {id: `${NAME}-status`}), 'menu', {rank: 900}) // Notebook 7 has no status bar

    const words = answer => {
      if (chosen.show !== 'notebook') return chosen.show === 'sum' ? answer.sum : answer.status
      const own = answer.groups.find(one => one.kernel && one.kernel === kernel())
      return [own ? `${own.title} ${own.bytes}` : 'nothing held here', ...answer.notes].join(' · ')
    }

    // When each alert was last seen by any page of this browser: two pages, or a reload, tell it once.
    function seenBefore(ids) {
      let before = {}
      try {
        before = JSON.parse(localStorage.getItem(SEEN)) ?? {}
      } catch { /* the browser stores nothing, or something else is there: all is new */ }
      const recent = Object.entries(before).filter(([, at]) => Date.now() - at < TOLD_MS)
      try {
        if (ids.length || recent.length) localStorage.setItem(SEEN, JSON.stringify({...Object.fromEntries(recent), ...Object.fromEntries(ids.map(id => [id, Date.now()]))}))
      } catch { /* the storage is full: this page alone remembers nothing */ }
      return new Set(recent.map(([id]) => id))
    }

    // What is above a threshold of the user's, as texts. Each has a notification when it begins.
    function alerts(answer) {
      const {alertPercent: percent, alertWaitSeconds: wait} = chosen
      const full = answer.devices.filter(card => percent && card.id !== 'host' && 100 * card.part >= percent)
      const late = answer.waiting.filter(one => wait && Date.now() / 1000 - one.since >= wait)
      const found = new Map([...full.map(card => [`${answer.ledger.key} ${card.id}`, `${card.title} is ${Math.round(100 * card.part)} % full: ${card.fill}`]),
        ...late.map(one => [one.id, `${one.name} (${one.holder}) has waited for ${one.need} ${duration(one.since)}`])])
      const before = seenBefore([...found.keys()])
      for (const [id, told] of found) if (!before.has(id)) Notification?.warning(told, {autoClose: DONE_MS})
      return [...found.values()]
    }

    function draw(answer, error) {
      const problems = answer ? answer.problems : []
      const above = answer ? alerts(answer) : []
      text.textContent = answer ? words(answer) : 'GPU ?'
      status.classList.toggle('gpu-off', Boolean(error))
      status.classList.toggle('gpu-problem', problems.length + above.length > 0)
      const lines = answer ? [...answer.devices.map(card => `${card.title}: ${card.fill}`), ...problems.map(one => one.text), ...above, `Ledger: ${answer.ledger.title}. ${LEDGER}`] : []
      status.title = [error, ...lines].filter(Boolean).join('\n')
      status.setAttribute('aria-label', `GPU memory: ${text.textContent}`)
      item.setHidden(chosen.show === 'nothing')
      panel.show(answer, error)
      if (answer) beside(answer.groups)
    }

    let last = null
    let failed = '' // why there are no new figures
    const beside = running ? besideKernels(running) : () => {}
    setInterval(() => last && chosen.alertWaitSeconds && draw(last, failed), 5000) // a wait grows without a new answer
    registry?.load(`${NAME}:memory`).then(settings => {
      const read = () => {
        Object.assign(chosen, settings.composite)
        if (last) draw(last, failed)
      }
      settings.changed.connect(read)
      read()
    }).catch(error => console.warn('GPU console:', error)) // the defaults hold
    const kernel = () => tracker?.currentWidget?.sessionContext?.session?.kernel?.id
    const poll = new Poll(request, kernel, answer => draw((last = answer), (failed = '')),
      why => draw(last, (failed = `No new figures: ${why}`)))
    tracker?.currentChanged.connect(() => poll.now())
  }

  const container = {
    init: given => { scope = given },
    get: async () => {
      const exports = {__esModule: true, default: await plugins()}
      return () => exports
    },
  }
  ;(window._JUPYTERLAB ??= {})[NAME] = container
})()
