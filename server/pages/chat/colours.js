
// The colours of code: highlight.js cuts it into named pieces, and they become spans here.

const MAX_COLOURED = 20000; // characters: a block that grows is coloured again with each chunk
// Names of highlight.js by the colour of the style sheet.
const COLOURS = {
  keyword: "keyword", literal: "keyword", operator: "keyword", built_in: "name", type: "name", title: "name", class: "name", section: "name",
  name: "name", tag: "name", "selector-tag": "name", string: "string", regexp: "string", addition: "string", char: "string", template: "string",
  number: "number", symbol: "number", bullet: "number", link: "number", attr: "attribute", attribute: "attribute", property: "attribute",
  variable: "attribute", "selector-class": "attribute", "selector-id": "attribute", meta: "meta", doctag: "meta",
  comment: "comment", quote: "comment", deletion: "deletion",
};

/** Return the nodes of a piece of code, without colours where its language is not known. */
function coloured(text, language) {
  if (!language || text.length > MAX_COLOURED || !hasLibrary("highlight", "hljs") || !hljs.getLanguage(language)) return [text];
  const { _emitter: { rootNode } } = hljs.highlight(text, { language, ignoreIllegals: true });
  return rootNode.children.map(pieceNode);
}

function pieceNode(piece) {
  if (typeof piece === "string") return piece;
  const colour = COLOURS[piece.scope?.split(".")[0]];
  return element("span", { class: colour && `c-${colour}` }, ...piece.children.map(pieceNode));
}
