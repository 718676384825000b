// A picture of the stage takes the whole width when it is clicked, and its place again when it is clicked once more.
element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-zoom]');
  if (!button) return;
  const figure = button.closest('figure'), wide = !figure.classList.contains('tc-wide');
  for (const other of element.querySelectorAll('figure')) {
    other.classList.remove('tc-wide');
    other.querySelector('button').setAttribute('aria-expanded', 'false');
  }
  figure.classList.toggle('tc-wide', wide);
  button.setAttribute('aria-expanded', String(wide));
});

// The server knows neither the reader's clock nor language.
function localise() {
  for (const each of element.querySelectorAll('time[datetime]')) {
    each.textContent = new Date(each.dateTime).toLocaleString([], {dateStyle: 'medium', timeStyle: 'short'});
  }
}
watch('value', localise);
localise();
