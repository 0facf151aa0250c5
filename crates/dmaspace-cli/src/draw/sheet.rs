//! Text in two columns, names and values, with colour where a terminal has it.
//!
//! Ours and not `comfy-table` or `tabled`: tables are twenty lines of it, and prose that wraps beside a name is
//! none.

use std::io::{self, IsTerminal};

/// Where values begin.
const INDENT: usize = 14;
/// Where prose breaks.
const WIDTH: usize = 80;

/// Whether to mark with colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Paint {
    Plain,
    Colour,
}

impl Paint {
    /// Colour on a terminal that has it, unless NO_COLOR asks for none (<https://no-color.org>).
    pub(crate) fn for_stdout() -> Self {
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        if io::stdout().is_terminal() && !set("NO_COLOR") && !dumb {
            Self::Colour
        } else {
            Self::Plain
        }
    }

    fn with(self, code: &str, text: &str) -> String {
        match self {
            Self::Plain => text.into(),
            Self::Colour => format!("\x1b[{code}m{text}\x1b[0m"),
        }
    }

    pub(crate) fn bold(self, text: &str) -> String {
        self.with("1", text)
    }

    pub(crate) fn good(self, text: &str) -> String {
        self.with("1;32", text)
    }

    pub(crate) fn bad(self, text: &str) -> String {
        self.with("1;31", text)
    }

    pub(crate) fn warning(self, text: &str) -> String {
        self.with("1;33", text)
    }
}

/// Lines in columns.
pub(crate) struct Sheet {
    text: String,
    paint: Paint,
}

impl Sheet {
    pub(crate) fn new(paint: Paint) -> Self {
        Self {
            text: String::new(),
            paint,
        }
    }

    pub(crate) fn paint(&self) -> Paint {
        self.paint
    }

    pub(crate) fn into_text(self) -> String {
        self.text
    }

    pub(crate) fn gap(&mut self) {
        if !self.text.is_empty() {
            self.text.push('\n');
        }
    }

    pub(crate) fn section(&mut self, name: &str) {
        self.gap();
        self.line(&self.paint.bold(name));
    }

    /// A name and its value; prose goes on below itself.
    pub(crate) fn value(&mut self, name: &str, value: &str) {
        self.marked(name, str::to_string, "", value);
    }

    /// The same with a mark in front, which `paint` colours. A name that reaches the column of values has a
    /// line of its own.
    pub(crate) fn marked(
        &mut self,
        name: &str,
        paint: impl Fn(&str) -> String,
        mark: &str,
        value: &str,
    ) {
        let width = WIDTH - INDENT;
        let mut line = format!("  {name:<0$}", INDENT - 2);
        if name.chars().count() > INDENT - 3 {
            self.line(&line);
            line = " ".repeat(INDENT);
        }
        let mut room = width;
        if !mark.is_empty() {
            line += &(paint(mark) + " ");
            room = room.saturating_sub(mark.chars().count() + 1);
        }
        let mut rest = value;
        while rest.chars().count() > room {
            // The last space that still fits; a word that is too long stays whole.
            let limit = rest.char_indices().nth(room + 1);
            let head = limit.and_then(|(at, _)| rest.get(..at)).unwrap_or(rest);
            let Some((head, _)) = head.rsplit_once(' ').or_else(|| rest.split_once(' ')) else {
                break;
            };
            let tail = rest.get(head.len()..).unwrap_or_default();
            self.line(&(line + head));
            line = " ".repeat(INDENT);
            room = width;
            rest = tail.trim_start();
        }
        self.line(&(line + rest));
    }

    /// Rows of cells in columns, each as wide as its widest cell.
    pub(crate) fn table<R: AsRef<[String]>>(&mut self, rows: &[R]) {
        let width = |cell: &String| cell.chars().count();
        let columns = rows.iter().map(|row| row.as_ref().len()).max();
        let widths: Vec<usize> = (0..columns.unwrap_or(0))
            .map(|column| {
                let cells = rows.iter().filter_map(|row| row.as_ref().get(column));
                cells.map(width).max().unwrap_or(0)
            })
            .collect();
        for row in rows {
            let mut line = String::new();
            for (cell, width) in row.as_ref().iter().zip(&widths) {
                line += &format!("  {cell:<width$}");
            }
            self.line(&line);
        }
    }

    pub(crate) fn line(&mut self, line: &str) {
        self.text += line.trim_end();
        self.text.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_never_runs_into_its_value() {
        for (name, expected) in [
            ("elevenchars", "  elevenchars value\n"),
            ("twelve chars", "  twelve chars\n              value\n"),
            ("0x10000000000", "  0x10000000000\n              value\n"),
        ] {
            let mut sheet = Sheet::new(Paint::Plain);
            sheet.value(name, "value");
            assert_eq!(sheet.into_text(), expected);
            let mut sheet = Sheet::new(Paint::Plain);
            sheet.marked(name, str::to_string, "!", "value");
            assert_eq!(sheet.into_text(), expected.replace("value", "! value"));
        }
    }
}
