// One listener for all buttons that the server writes into this element: what was chosen goes out as the event "pick".
element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-act]');
  if (button && element.contains(button) && !button.disabled) {
    trigger('pick', {act: button.dataset.act, id: button.dataset.id || ''});
  }
});
