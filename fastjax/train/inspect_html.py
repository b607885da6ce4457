"""An inspection as one HTML page that needs nothing from the network."""

from html import escape
from typing import TYPE_CHECKING

from fastjax.errors import UserError

if TYPE_CHECKING:
    from fastjax.train.data import DataReport
    from fastjax.train.inspect_rows import Inspection, Piece

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
pre, .row { font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.row { border: 1px solid #8886; border-radius: 6px; padding: .6rem .8rem; margin: .3rem 0 1.2rem; }
.document + .document { border-top: 2px dashed #38c; margin-top: .6rem; padding-top: .6rem; }
.note { color: #38c; font-size: 12px; }
span { border-radius: 2px; box-shadow: inset 1px 0 #8883; }
.t { background: #2a94; }
.m { color: #888; }
""".strip()


def page(found: "Inspection") -> str:
    """The page's text; each token's id is in its tooltip."""
    rows = "\n".join(
        f"<h3>row {number}: {escape(str(row))}</h3>\n<div class='row'>{_documents(row.documents)}</div>"
        for number, row in enumerate(found.rows, start=1)
    )
    reports = [found.report] + ([] if found.eval_report is None else [found.eval_report])
    counts = "\n".join(f"<pre>{escape(str(report))}</pre>" for report in reports)
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{escape(_title(found.report))}</title>\n"
        f"<style>{_STYLE}</style></head><body>\n<h1>{escape(_title(found.report))}</h1>\n{counts}\n"
        "<h2>Rows as they are trained</h2>\n<p><span class='t'>trained</span> <span class='m'>masked</span></p>\n"
        f"{rows}\n</body></html>\n"
    )


def _title(report: "DataReport") -> str:
    return f"Training rows of {report.source}"


def _documents(documents: list["Piece"]) -> str:
    return "".join(
        f"<div class='document'><div class='note'>document {number}: {len(piece.ids):,} tokens, "
        f"{sum(piece.trained):,} targets</div>{_tokens(piece)}</div>"
        for number, piece in enumerate(documents, start=1)
    )


def _tokens(piece: "Piece") -> str:
    return "".join(
        f"<span class='{'t' if trained else 'm'}' title='{token}'>{escape(text).replace(chr(10), '↵' + chr(10))}</span>"
        for token, text, trained in zip(piece.ids, piece.texts, piece.trained, strict=True)
    )


def write_inspection(found: "Inspection", path: str) -> None:
    """The same as an HTML page. Raises: UserError if the file cannot be written."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(page(found))
    except OSError as error:
        raise UserError(f"html={path!r} cannot be written ({error.strerror or error}); give another file") from None
