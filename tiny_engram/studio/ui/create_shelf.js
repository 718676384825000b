// The shelf: chips that write their trigger into the prompt, and a slider for each concept. The value of the component is
// {html, keep, strengths}: strengths is what the sliders say, html what the server wrote. With keep the sliders stay where the user had them.
const KEY = 'tiny-engram-strengths';
let chosen = new Map();
try {
  chosen = new Map(JSON.parse(sessionStorage.getItem(KEY) || '[]'));
} catch {}  // a browser that keeps nothing
const sliders = () => Array.from(element.querySelectorAll('input[data-id]'));

function show(slider, strength) {
  slider.value = strength;
  slider.setAttribute('value', slider.value);
  slider.parentElement.querySelector('output').textContent = Number(slider.value).toFixed(2);
  chosen.set(slider.dataset.id, Number(slider.value));
}

function collect() {
  const strengths = {};
  for (const slider of sliders()) strengths[slider.dataset.id] = Number(slider.value);
  if (JSON.stringify(strengths) !== JSON.stringify((props.value || {}).strengths)) props.value = {...props.value, strengths};
}

function settle() {
  const keep = (props.value || {}).keep;
  for (const slider of sliders()) {
    const written = Number(slider.dataset.strength);
    show(slider, keep && chosen.has(slider.dataset.id) ? chosen.get(slider.dataset.id) : written);
  }
  collect();
}

function insert(trigger_text) {
  const box = document.querySelector('#create-prompt textarea');
  if (!box) return;
  const [low, high] = [box.selectionStart, box.selectionEnd];
  const before = box.value.slice(0, low), after = box.value.slice(high);
  const text = (before && !/\s$/.test(before) ? ' ' : '') + trigger_text + (after && !/^[\s,.;:!?]/.test(after) ? ' ' : '');
  box.value = before + text + after;
  box.dispatchEvent(new Event('input', {bubbles: true}));
  box.focus();
  box.setSelectionRange(low + text.length, low + text.length);
}

element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-act]');
  if (!button || !element.contains(button)) return;
  if (button.dataset.act === 'insert') insert(button.dataset.text);
  else trigger('pick', {act: button.dataset.act, id: button.dataset.id || ''});
});
element.addEventListener('input', (event) => {
  if (!event.target.dataset.id) return;
  show(event.target, event.target.value);
  collect();
  try {
    sessionStorage.setItem(KEY, JSON.stringify(Array.from(chosen)));
  } catch {}
});
watch('value', settle);
settle();
