//! Dumps of VT-d's tables from debugfs, pasted into mails: indented, behind a prompt, cut.
//!
//! The rows are cleaned here, and read by the reader of `dmaspace tables`.

use super::super::facts::{DumpText, Facts};
use super::super::finding::{At, Evidence, Place};
use super::super::number::pci;

/// The most rows of a dump that are kept.
const MOST_ROWS: usize = 1 << 20;

/// A dump that is being read.
#[derive(Debug, Default)]
pub(in crate::explain) struct Dumps {
    open: Option<DumpText>,
    /// Columns of the heading.
    columns: usize,
}

impl Dumps {
    /// Takes a line; false: it is none of a dump.
    pub(in crate::explain) fn line(
        &mut self,
        facts: &mut Facts,
        file: usize,
        at: u64,
        text: &str,
    ) -> bool {
        let line = text.trim();
        let evidence = || Evidence {
            place: Place {
                file,
                at: At::Line(at),
            },
            quote: super::super::finding::plain(
                line.get(..line.len().min(200)).unwrap_or_default(),
            ),
        };
        if let Some(device) = heading(line) {
            self.finish(facts);
            facts.content(file, "debugfs domain_translation_struct");
            self.columns = 0;
            self.open = Some(DumpText {
                device,
                text: format!("{line}\n"),
                rows: Vec::new(),
                heading: evidence(),
                cut: None,
            });
            return true;
        }
        if line.contains("domain_translation_struct") && line.len() < 200 {
            return true;
        }
        let Some(open) = &mut self.open else {
            return false;
        };
        if line.starts_with("IOVA_PFN") {
            self.columns = line.split_whitespace().count().saturating_sub(1);
            open.text += line;
            open.text.push('\n');
            return true;
        }
        if line.is_empty() {
            return true;
        }
        let marks = ["[...]", "...", "[snip]", "[cut]", "(cut)", "…", "--More--"];
        if marks
            .iter()
            .any(|mark| line == *mark || line.starts_with("[..."))
        {
            open.cut.get_or_insert_with(evidence);
            return true;
        }
        let entries = line.split_once('|');
        let words = |text: &str| {
            text.split_whitespace()
                .filter(|word| word.starts_with("0x"))
                .count()
        };
        match entries {
            Some((pfn, columns)) if pfn.trim().starts_with("0x") => {
                let count = words(columns);
                let pfn = super::super::number::number(pfn.trim());
                if count >= 3 && (self.columns == 0 || count == self.columns) {
                    if open.rows.len() < MOST_ROWS {
                        open.rows.extend(pfn.map(|pfn| (pfn, at)));
                        open.text += line;
                        open.text.push('\n');
                    } else {
                        open.cut.get_or_insert_with(evidence);
                    }
                } else {
                    open.cut.get_or_insert_with(evidence);
                }
                true
            }
            // Columns that a mail has put below.
            _ if line.starts_with("0x") && words(line) >= 1
                || line.starts_with("PDPE")
                || line.starts_with("PTE") =>
            {
                open.cut.get_or_insert_with(evidence);
                true
            }
            _ => {
                self.finish(facts);
                false
            }
        }
    }

    /// Ends the dump that is open.
    pub(in crate::explain) fn finish(&mut self, facts: &mut Facts) {
        const MOST_DUMPS: usize = 1024;
        if let Some(dump) = self.open.take() {
            if facts.dumps.len() < MOST_DUMPS {
                facts.dumps.push(dump);
            } else {
                *facts.dropped.entry("dumps").or_default() += 1;
            }
        }
    }
}

/// `Device 0000:00:1f.0 @0x105407000`, `Device 0000:00:0a.0 with pasid 2 @0x1083d1000`.
fn heading(line: &str) -> Option<String> {
    let rest = line.strip_prefix("Device ")?;
    let (name, root) = rest.split_once('@')?;
    super::super::number::number(root.trim())?;
    let mut words = name.split_whitespace();
    let device = pci(words.next()?)?;
    match (words.next(), words.next(), words.next()) {
        (None, ..) | (Some("with"), Some("pasid"), Some(_)) => Some(device),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: &str = "0x0000000000001 |\t0x0000000000000000\t0x0000000105408003\t0x0000000105409003\t0x000000010540a003\t0x0000000000001003";

    fn read(text: &str) -> Facts {
        let (mut facts, mut dumps) = (Facts::default(), Dumps::default());
        for (at, line) in (1..).zip(text.lines()) {
            dumps.line(&mut facts, 0, at, line);
        }
        dumps.finish(&mut facts);
        facts
    }

    #[test]
    fn dumps_are_read_behind_prompts_and_blanks() {
        let head = "IOVA_PFN                PML5E                   PML4E                   PDPE                    PDE                     PTE";
        let text = format!(
            "$ sudo cat /sys/kernel/debug/iommu/intel/domain_translation_struct\n    Device 0000:00:1f.0 @0x105407000\n    {head}\n    {ROW}\n"
        );
        let facts = read(&text);
        assert_eq!(facts.dumps[0].device, "0000:00:1f.0");
        assert_eq!(facts.dumps[0].rows, [(1, 4)]);
        assert!(facts.dumps[0].cut.is_none());
        let cut = read(&format!("{text}[...]\n"));
        assert!(cut.dumps[0].cut.is_some());
    }

    #[test]
    fn missing_columns_are_a_cut() {
        let text = "Device 0000:00:1f.0 @0x105407000\nIOVA_PFN PML5E PML4E\n0x0 | 0x0 0x0000000105408003\n";
        assert!(read(text).dumps[0].cut.is_some());
    }
}
