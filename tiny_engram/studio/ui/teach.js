// The Teach tab's elements: buttons that the server writes (data-action, data-ask, data-zoom) and captions that are typed into.
// What is done goes out as the event "act", what is typed as the event "typed"; the value of the tray is {html, trigger, spellings}.
const typed = {};
let soon = null;

function box(label) {
  const dialog = document.createElement('dialog');
  dialog.className = 'te tt-dialog';
  dialog.setAttribute('aria-label', label);
  const back = document.activeElement;
  dialog.addEventListener('close', () => {
    dialog.remove();
    if (back && back.isConnected) back.focus();
  });
  dialog.addEventListener('click', (event) => { if (event.target === dialog) dialog.close(); });
  document.body.append(dialog);
  return dialog;
}

function put(parent, tag, text, name) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (name) made.className = name;
  parent.append(made);
  return made;
}

function ask(text, yes, then) {
  const dialog = box(text);
  put(dialog, 'p', text);
  const row = put(dialog, 'div', '', 'te-tools');
  const keep = put(row, 'button', 'Go back', 'te-button');
  keep.addEventListener('click', () => dialog.close());
  put(row, 'button', yes, 'te-button tt-danger').addEventListener('click', () => { dialog.close(); then(); });
  dialog.showModal();
  keep.focus({focusVisible: true});  // seen to be there, also after a click
}

function zoom(image, text) {
  const dialog = box(text);
  dialog.classList.add('tt-large');
  const shown = put(dialog, 'img', '');
  shown.src = image.src;
  shown.alt = image.alt;
  put(dialog, 'p', text);
  const close = put(dialog, 'button', 'Close', 'te-button');
  close.addEventListener('click', () => dialog.close());
  dialog.showModal();
  close.focus();
}

const word = () => (props.value || {}).trigger || '';
const spellings = () => ((props.value || {}).spellings || []).map((each) => each.toLowerCase());
const captions = () => Array.from(element.querySelectorAll('textarea[data-id]'));

function check(area) {
  const text = area.value.toLowerCase();
  const calls = spellings();
  const bad = Boolean(text.trim()) && !text.includes('{trigger}') && calls.length > 0 && !calls.some((each) => text.includes(each));
  area.classList.toggle('tt-nocall', bad);
  area.setAttribute('aria-invalid', String(bad));
  area.parentElement.querySelector('.tt-warn').hidden = !bad;
}

// For whoever asks at once, such as Start: an event that is on its way may come too late.
function show() { element.dataset.typed = JSON.stringify({captions: typed, trigger: word()}); }

// All that was typed since the server wrote the tray goes out each time: events may be joined, and the last one must have everything.
function send() {
  clearTimeout(soon);
  soon = null;
  if (Object.keys(typed).length) trigger('typed', {captions: {...typed}, trigger: word()});
}

function settle() {
  for (const id of Object.keys(typed)) if (!captions().some((area) => area.dataset.id === id)) delete typed[id];
  for (const area of captions()) {
    const said = typed[area.dataset.id];
    const written = area.dataset.caption.replaceAll('{trigger}', word() || '{trigger}');
    // what is being typed is newer than what the server knew
    const text = said !== undefined && document.activeElement === area ? said : written;
    if (text === written) delete typed[area.dataset.id];
    if (area.value !== text) area.value = text;
    check(area);
  }
  show();
}

element.addEventListener('click', (event) => {
  const larger = event.target.closest('[data-zoom]');
  if (larger && element.contains(larger)) return zoom(larger.querySelector('img'), larger.dataset.zoom);
  const button = event.target.closest('button[data-action]');
  if (!button || !element.contains(button) || button.disabled) return undefined;
  const told = {action: button.dataset.action, id: button.dataset.id || ''};
  const act = () => trigger('act', {...told, captions: {...typed}, trigger: word()});
  // what is typed is worth a question; a picture alone can be dropped again
  const area = button.closest('.tt-card')?.querySelector('textarea');
  const asks = button.dataset.ask && (!area || area.value.trim());
  return asks ? ask(button.dataset.ask, button.dataset.yes, act) : act();
});
element.addEventListener('input', (event) => {
  const area = event.target.closest('textarea[data-id]');
  if (!area) return;
  typed[area.dataset.id] = area.value;
  show();
  check(area);
  clearTimeout(soon);
  soon = setTimeout(send, 300);
});
element.addEventListener('focusout', () => { if (soon) send(); });
window.addEventListener('pagehide', () => { if (soon) send(); });
watch('value', settle);
settle();
