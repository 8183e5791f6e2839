// In the search, a leading dash excludes a word. Readers search flags such as --max-price, so remove it.
document.addEventListener("input", event => {
  const box = event.target
  if (box.matches(".md-search__input")) {
    const words = box.value.replace(/(^|\s)-+(?=\S)/g, "$1")
    if (words !== box.value) box.value = words
  }
}, true)
