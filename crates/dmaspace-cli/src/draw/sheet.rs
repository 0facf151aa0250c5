//! Text in two columns, names and values, with colour where a terminal has it.
//!
//! Ours and not `comfy-table` or `tabled`: tables are twenty lines of it, and prose wrapped beside a name is no
//! table.

use std::io::{self, IsTerminal};
use std::mem;

use crate::draw::terminal;

/// Where values begin.
const INDENT: usize = 14;

/// How text is laid out: its width, and whether to mark with colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Paint {
    colour: bool,
    columns: usize,
}

impl Paint {
    /// Without colour, as wide as what is no terminal.
    #[cfg(test)]
    pub(crate) const PLAIN: Self = Self {
        colour: false,
        columns: terminal::COLUMNS,
    };

    /// Colour on a terminal that has it, unless NO_COLOR asks for none (<https://no-color.org>).
    pub(crate) fn for_stdout() -> Self {
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self {
            colour: io::stdout().is_terminal() && !set("NO_COLOR") && !dumb,
            columns: terminal::columns(),
        }
    }

    #[cfg(test)]
    pub(crate) fn with_colour(self) -> Self {
        Self {
            colour: true,
            ..self
        }
    }

    fn with(self, code: &str, text: &str) -> String {
        match self.colour {
            false => text.into(),
            true => format!("\x1b[{code}m{text}\x1b[0m"),
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

/// The columns that the text takes; marks of colour take none.
fn width(text: &str) -> usize {
    let mut parts = text.split("\x1b[");
    let first = parts.next().map_or(0, |part| part.chars().count());
    let marked = parts.map(|part| part.split_once('m').map_or(part, |(_, shown)| shown));
    first + marked.map(|part| part.chars().count()).sum::<usize>()
}

/// Where the text may be broken: at spaces, but a figure stays with its unit.
fn breaks(text: &str) -> impl Iterator<Item = usize> {
    let spaces = text.match_indices(' ').map(|(at, _)| at);
    spaces.filter(move |at| {
        let (before, after) = text.split_at(*at);
        let figure = before.ends_with(|c: char| c.is_ascii_digit());
        !(figure && after.trim_start().starts_with(char::is_alphabetic))
    })
}

/// The text in lines that fit `first` columns, then `rest`. Text without a break stays whole, even if it is too long.
fn lines(text: &str, first: usize, rest: usize) -> Vec<&str> {
    let mut lines = Vec::new();
    let (mut text, mut room) = (text, first);
    while width(text) > room {
        let begun = text.len() - text.trim_start().len();
        let mut breaks = breaks(text).filter(|at| *at > begun);
        let Some(mut end) = breaks.next() else {
            break;
        };
        // The last that still fits.
        for at in breaks.take_while(|at| text.get(..*at).is_some_and(|head| width(head) <= room)) {
            end = at;
        }
        let (head, tail) = text.split_at(end);
        lines.push(head.trim_end());
        text = tail.trim_start();
        room = rest;
    }
    lines.push(text);
    lines
}

/// Lines in columns, none wider than there is room for.
pub(crate) struct Sheet {
    text: String,
    paint: Paint,
    /// Lines to be copied.
    #[cfg(test)]
    unbroken: Vec<String>,
}

impl Sheet {
    pub(crate) fn new(paint: Paint) -> Self {
        Self {
            text: String::new(),
            paint,
            #[cfg(test)]
            unbroken: Vec::new(),
        }
    }

    pub(crate) fn paint(&self) -> Paint {
        self.paint
    }

    /// In tests of reports, a line that does not fit fails.
    pub(crate) fn into_text(self) -> String {
        #[cfg(test)]
        tests::fits(&self.text, self.paint.columns, &self.unbroken);
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
        let mut line = format!("  {name:<0$}", INDENT - 2);
        if name.chars().count() > INDENT - 3 {
            self.push(&line);
            line = " ".repeat(INDENT);
        }
        if !mark.is_empty() {
            line += &(paint(mark) + " ");
        }
        let room = self.paint.columns.saturating_sub(INDENT);
        let first = self.paint.columns.saturating_sub(width(&line));
        for part in lines(value, first, room) {
            self.push(&(line + part));
            line = " ".repeat(INDENT);
        }
    }

    /// Rows of cells in columns, each as wide as its widest cell; where that is too much for the room, the
    /// widest columns are broken into lines.
    pub(crate) fn table<R: AsRef<[String]>>(&mut self, rows: &[R]) {
        let widest = |column: usize, of: &dyn Fn(&str) -> usize| {
            let cells = rows.iter().filter_map(|row| row.as_ref().get(column));
            cells.map(|cell| of(cell)).max().unwrap_or(0)
        };
        let columns = rows.iter().map(|row| row.as_ref().len()).max();
        let columns = 0..columns.unwrap_or(0);
        let least = columns.clone().scan(0, |sum, at| {
            *sum += 2 + widest(at, &longest_word);
            Some(*sum)
        });
        let fit = least.take_while(|sum| *sum <= self.paint.columns).count();
        if (2..columns.end).contains(&fit) {
            // Columns that have no room stand below, beside the first again.
            let part = |from: usize, to: usize| {
                let row = |row: &R| {
                    let cells = row.as_ref();
                    let part = cells.get(from..to.min(cells.len())).unwrap_or_default();
                    [cells.get(..1).unwrap_or_default(), part].concat()
                };
                rows.iter().map(row).collect::<Vec<_>>()
            };
            self.table(&part(1, fit));
            self.gap();
            let mut below = part(fit, columns.end);
            below.retain(|row| row.iter().skip(1).any(|cell| !cell.is_empty()));
            return self.table(&below);
        }
        let natural: Vec<usize> = columns.map(|at| widest(at, &width)).collect();
        let room = self.paint.columns.saturating_sub(2 * natural.len());
        let mut widths = natural.clone();
        for _ in room..natural.iter().sum() {
            let broken = widths.iter_mut().enumerate();
            let broken = broken.filter(|(at, width)| **width > widest(*at, &longest_word));
            let Some((_, width)) = broken.max_by_key(|(_, width)| **width) else {
                break;
            };
            *width -= 1;
        }
        // Room that lines leave in a column goes to the last.
        for (at, width) in widths.iter_mut().enumerate() {
            *width = widest(at, &|cell| {
                let lines = lines(cell, *width, *width);
                lines.into_iter().map(self::width).max().unwrap_or(0)
            });
        }
        let left = room.saturating_sub(widths.iter().sum());
        if let Some((last, natural)) = widths.last_mut().zip(natural.last()) {
            *last = (*last + left).min(*natural);
        }
        for row in rows {
            let cells = row.as_ref().iter().zip(&widths);
            let cells: Vec<_> = cells
                .map(|(cell, width)| lines(cell, *width, *width))
                .collect();
            for nth in 0..cells.iter().map(Vec::len).max().unwrap_or(0) {
                let mut line = String::new();
                for (cell, wide) in cells.iter().zip(&widths) {
                    let part = cell.get(nth).copied().unwrap_or_default();
                    line += &format!("  {part}{:1$}", "", wide.saturating_sub(width(part)));
                }
                self.push(&line);
            }
        }
    }

    /// A line; where it is too long it goes on below, further in.
    pub(crate) fn line(&mut self, line: &str) {
        let indent = line.len() - line.trim_start().len();
        let further = " ".repeat(indent + 4);
        let columns = self.paint.columns;
        let room = columns.saturating_sub(further.len());
        for (nth, part) in lines(line.trim_end(), columns, room).iter().enumerate() {
            match nth {
                0 => self.push(part),
                _ => self.push(&format!("{further}{part}")),
            }
        }
    }

    /// A line to be copied, a command for instance: it is broken nowhere, however long it is.
    pub(crate) fn copied(&mut self, line: &str) {
        #[cfg(test)]
        self.unbroken.push(line.trim_end().to_owned());
        self.push(line);
    }

    /// The columns there are.
    pub(crate) fn columns(&self) -> usize {
        self.paint.columns
    }

    fn push(&mut self, line: &str) {
        self.text += line.trim_end();
        self.text.push('\n');
    }
}

/// The widest part that is not broken.
fn longest_word(text: &str) -> usize {
    let ends = breaks(text).chain([text.len()]);
    let parts = ends.scan(0, |begun, end| text.get(mem::replace(begun, end)..end));
    parts.map(|part| width(part.trim())).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No line is wider than this, in ASCII neither, unless it is one word, or to be copied.
    pub(super) fn fits(text: &str, columns: usize, unbroken: &[String]) {
        let broken = |line: &&str| !unbroken.iter().any(|whole| whole == line);
        for line in text.lines().filter(broken) {
            let ascii = terminal::ascii(line);
            assert!(ascii.is_ascii(), "{line}");
            for line in [line, &ascii] {
                let one_word = longest_word(line.trim_start()) + INDENT > columns;
                assert!(width(line) <= columns || one_word, "{line}");
            }
        }
    }

    fn at(columns: usize) -> Sheet {
        Sheet::new(Paint {
            columns,
            ..Paint::PLAIN
        })
    }

    #[test]
    fn what_is_too_wide_goes_on_below() {
        let mut sheet = at(40);
        sheet.section("a heading that is wider than what there is room for");
        sheet.line("  0x7f0bb6146000 + 516 KiB: 516 KiB present, anonymous");
        sheet.value("name", "prose that goes on below itself, word by word");
        let rows = [
            ["address", "a head of two words", "use"],
            ["0x1000", "12.3 (12.0 to 14.1)", "bind it to vfio-pci first"],
        ];
        sheet.table(&rows.map(|row| row.map(String::from)));
        let expected = "\
a heading that is wider than what there
    is room for
  0x7f0bb6146000 + 516 KiB: 516 KiB
      present, anonymous
  name        prose that goes on below
              itself, word by word
  address  a head of two  use
           words
  0x1000   12.3 (12.0 to  bind it to
           14.1)          vfio-pci first
";
        assert_eq!(sheet.into_text(), expected);
    }

    #[test]
    fn a_line_to_be_copied_is_not_broken() {
        let mut sheet = at(40);
        sheet.copied("  -object memory-backend-memfd,id=m,size=4G,hugetlb=on");
        sheet.copied("  echo 2048 > /sys/kernel/mm/hugepages/nr");
        let expected = "  -object memory-backend-memfd,id=m,size=4G,hugetlb=on
  echo 2048 > /sys/kernel/mm/hugepages/nr
";
        assert_eq!(sheet.into_text(), expected);
    }

    #[test]
    fn columns_without_room_stand_below_the_others() {
        let mut sheet = at(40);
        let row = |cells: [&str; 5]| cells.map(String::from);
        sheet.table(&[
            row(["address", "shared", "per-node", "near(0)", "near(1)"]),
            row(["0000:17:00.0", "14.1", "14.1", "14.1", "10.5"]),
            row(["0000:31:00.0", "14.1", "14.1", "", ""]),
        ]);
        // There, a row without cells is left out.
        let expected = "  address       shared  per-node
  0000:17:00.0  14.1    14.1
  0000:31:00.0  14.1    14.1

  address       near(0)  near(1)
  0000:17:00.0  14.1     10.5
";
        assert_eq!(sheet.into_text(), expected);
    }

    #[test]
    fn colour_takes_no_room() {
        let mut sheet = Sheet::new(at(20).paint().with_colour());
        sheet.section("twenty columns is it");
        assert_eq!(sheet.text, "\x1b[1mtwenty columns is it\x1b[0m\n");
    }

    #[test]
    fn a_name_never_runs_into_its_value() {
        for (name, expected) in [
            ("elevenchars", "  elevenchars value\n"),
            ("twelve chars", "  twelve chars\n              value\n"),
            ("0x10000000000", "  0x10000000000\n              value\n"),
        ] {
            let mut sheet = Sheet::new(Paint::PLAIN);
            sheet.value(name, "value");
            assert_eq!(sheet.into_text(), expected);
            let mut sheet = Sheet::new(Paint::PLAIN);
            sheet.marked(name, str::to_string, "!", "value");
            assert_eq!(sheet.into_text(), expected.replace("value", "! value"));
        }
    }
}
