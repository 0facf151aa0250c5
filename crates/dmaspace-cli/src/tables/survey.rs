//! All tables below a root: counted, checked, and their leaves joined to runs.
//!
//! One [scan](iopt::walk::Walker::scan) does everything. A table that several entries lead to is read
//! the first time only, for each level that it is used as: that bounds the work by the file, and the
//! second entry is a finding. Leaves that continue each other in both address spaces with the same
//! permissions are one run, whatever their sizes.

use std::collections::HashMap;
use std::fmt::Display;

use iopt::walk::{Says, ScanStep, Visited, WalkReason};
use iopt::{FormatId, Prot};
use runs::{PageSizes, Run, Span};

use super::Tables;
use super::picture::Stretch;
use super::report::{
    Finding, FindingKind, LeafReport, LevelReport, RootReport, RunReport, Severity, Survey,
};
use super::tree::Tree;
use iopt::geometry::Geometry;

/// How much is read and kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tables that are read.
    pub tables: u64,
    /// Runs that are kept; those beyond are counted.
    pub runs: usize,
    /// Findings that are kept; those beyond are counted.
    pub findings: usize,
    /// Lines of the tree that are kept.
    pub lines: usize,
}

impl Default for Limits {
    /// 2^20 tables (4 GiB of tables of 4 KiB), 2^20 runs, 1,000 findings, 2^18 lines.
    fn default() -> Self {
        Self {
            tables: 1 << 20,
            runs: 1 << 20,
            findings: 1000,
            lines: 1 << 18,
        }
    }
}

/// A table that the scan is in.
struct Open {
    level: u8,
    present: u64,
    /// The visit of the entry that leads to it; none leads to the root.
    by: Option<Visited>,
    /// Leaves from the first entry on, without a gap: what they are so far.
    whole: Option<(Run, Prot)>,
    bytes: u64,
}

struct Scan {
    limits: Limits,
    geometry: Option<Geometry>,
    survey: Survey,
    open: Vec<Open>,
    seen: HashMap<(u64, u8), u64>,
    reached: HashMap<u64, ()>,
    /// The leaf that was met last, and how many bytes of it.
    leaf: Option<(Run, u64, Visited)>,
    run: Option<(Run, Prot, (u64, u64))>,
    tree: Tree,
    table_bytes: (u64, u64),
    entry_bytes: u64,
}

/// Reads all tables.
pub fn survey(tables: &Tables<'_>, limits: Limits) -> Survey {
    let root = tables.root();
    let geometry = Geometry::new(root.format, root.levels).ok();
    let walker = tables.walker();
    let aperture = walker.aperture();
    let entry_bytes = walker.entry_bytes().unwrap_or(8);
    let below = walker
        .span_log2(0)
        .map_or(9, |log2| log2 - smallest(root.format));
    let below_bytes = entry_bytes << below;
    let above_root = walker.span_log2(root.levels.saturating_sub(2));
    let root_entries = match (aperture, above_root) {
        (Some(aperture), Some(span)) => 1u64 << aperture.bits.saturating_sub(span).min(40),
        (Some(aperture), None) => 1 << aperture.bits.saturating_sub(smallest(root.format)).min(40),
        (None, _) => 1,
    };
    let mut scan = Scan {
        limits,
        geometry,
        survey: Survey {
            root: RootReport {
                format: root.format.name().into(),
                address: root.address,
                levels: root.levels,
                input_bits: aperture.map_or(0, |aperture| aperture.bits),
                aperture: aperture.map_or(String::new(), |aperture| aperture.to_string()),
            },
            levels: (0..root.levels)
                .rev()
                .map(|level| LevelReport {
                    level,
                    ..LevelReport::default()
                })
                .collect(),
            complete: true,
            ..Survey::default()
        },
        open: Vec::new(),
        seen: HashMap::new(),
        reached: HashMap::new(),
        leaf: None,
        run: None,
        tree: Tree::new(limits.lines),
        table_bytes: (entry_bytes * root_entries, below_bytes),
        entry_bytes,
    };
    let top = root.levels.saturating_sub(1);
    scan.enter(root.address, top, None);
    // The root was looked at when the tables were opened.
    let _ = walker.scan(tables, |entry| match tables.exhausted() {
        true => {
            scan.survey.complete = false;
            ScanStep::End
        }
        false => scan.take(entry),
    });
    scan.finish(tables)
}

/// The smallest page, as a power of two.
const fn smallest(format: FormatId) -> u32 {
    match format {
        FormatId::ArmStage1(config) | FormatId::ArmStage2(config) => {
            use iopt::format::ArmGranule::{K4, K4Lpa2, K16, K16Lpa2, K64, K64Lpa};
            match config.granule {
                K4 | K4Lpa2 => 12,
                K16 | K16Lpa2 => 14,
                K64 | K64Lpa => 16,
            }
        }
        FormatId::Dart(config) => config.page_log2 as u32,
        _ => 12,
    }
}

impl Scan {
    fn level(&mut self, level: u8) -> Option<&mut LevelReport> {
        self.survey
            .levels
            .iter_mut()
            .find(|report| report.level == level)
    }

    fn enter(&mut self, address: u64, level: u8, by: Option<Visited>) {
        let bytes = match by {
            None => self.table_bytes.0,
            Some(_) => self.table_bytes.1,
        };
        let entry_bytes = self.entry_bytes;
        if let Some(report) = self.level(level) {
            report.tables += 1;
            report.bytes += bytes;
            report.entries += bytes / entry_bytes;
        }
        self.survey.waste.all_bytes += bytes;
        self.reached.insert(address, ());
        self.open.push(Open {
            level,
            present: 0,
            by,
            whole: None,
            bytes,
        });
    }

    fn take(&mut self, entry: &Visited) -> ScanStep {
        while self
            .open
            .last()
            .is_some_and(|open| open.level < entry.level)
        {
            self.close();
        }
        if let Some(open) = self.open.last_mut() {
            open.present += 1;
        }
        if let Some(report) = self.level(entry.level) {
            report.present += 1;
        }
        match entry.says {
            Ok(Says::Table { address, level }) => self.table(entry, address, level),
            Ok(Says::Leaf(page)) => {
                self.leaf_entry(entry, page);
                ScanStep::Into
            }
            Err(reason) => {
                self.end_leaf();
                match reason {
                    WalkReason::NoMemory { address } => self.wrong(
                        entry,
                        FindingKind::Faults,
                        &format_args!("the table cannot be read from {address:#x} on"),
                    ),
                    reason => self.wrong(entry, FindingKind::Faults, &reason),
                }
                ScanStep::Into
            }
        }
    }

    fn table(&mut self, entry: &Visited, address: u64, level: u8) -> ScanStep {
        self.end_leaf();
        if let Some(first) = self.seen.get(&(address, level)).copied() {
            self.wrong(
                entry,
                FindingKind::Shared,
                &format_args!(
                    "leads to the table at {address:#x}, to which the entry for {first:#x} leads too; it \
                     is not read again"
                ),
            );
            return ScanStep::Past;
        }
        if self.seen.len() as u64 >= self.limits.tables {
            self.survey.complete = false;
            return ScanStep::End;
        }
        self.seen.insert((address, level), entry.iova);
        self.tree.table(self.open.len(), entry, address, level);
        self.enter(address, level, Some(*entry));
        ScanStep::Into
    }

    fn leaf_entry(&mut self, entry: &Visited, page: Run) {
        if let Some(report) = self.level(entry.level) {
            report.leaf_entries += 1;
        }
        if !entry.prot.intersects(Prot::RW) {
            let text = "a leaf without read and write permission, all levels together";
            self.find(entry, FindingKind::NoAccess, Severity::Note, &text);
        }
        let bytes = page.len.min(1 << entry.log2);
        match &mut self.leaf {
            Some((last, covered, _)) if *last == page => *covered += bytes,
            _ => {
                self.end_leaf();
                self.leaf = Some((page, bytes, *entry));
            }
        }
        // The part that this entry alone translates.
        let offset = entry.iova.wrapping_sub(page.iova) & (page.len - 1);
        let part = Run::new(entry.iova, Span::new(page.pa + offset, bytes));
        self.lay(part, page.len);
        let depth = self.open.len();
        self.tree.leaf(depth, entry, part, page.len);
        if let Some(open) = self.open.last_mut() {
            open.whole = match (open.whole, open.present) {
                (None, 1) if entry.index == 0 => Some((part, entry.prot)),
                (Some((run, prot)), _) if prot == entry.prot => {
                    join(run, part).map(|run| (run, prot))
                }
                _ => None,
            };
        }
        let joined = match self.run {
            Some((run, prot, sizes)) if prot == entry.prot => join(run, part)
                .map(|run| (run, prot, (sizes.0.min(page.len), sizes.1.max(page.len)))),
            _ => None,
        };
        if joined.is_none() {
            self.end_run();
        }
        self.run = joined.or(Some((part, entry.prot, (page.len, page.len))));
    }

    fn lay(&mut self, part: Run, leaf_bytes: u64) {
        let layout = &mut self.survey.layout;
        let room = layout.len() < self.limits.runs;
        match layout.last_mut() {
            Some(last)
                if last.leaf_bytes == leaf_bytes
                    && last.iova.checked_add(last.len_bytes) == Some(part.iova) =>
            {
                last.len_bytes = last.len_bytes.saturating_add(part.len);
            }
            _ if room => layout.push(Stretch {
                iova: part.iova,
                len_bytes: part.len,
                leaf_bytes,
            }),
            _ => {}
        }
    }

    /// The leaf that was met last is over.
    fn end_leaf(&mut self) {
        let Some((page, covered, entry)) = self.leaf.take() else {
            return;
        };
        self.survey.mapped_bytes = self.survey.mapped_bytes.saturating_add(covered);
        let leaves = &mut self.survey.leaves;
        let class = match leaves.iter_mut().find(|class| class.page_bytes == page.len) {
            Some(class) => class,
            None => {
                let at = leaves.partition_point(|class| class.page_bytes < page.len);
                leaves.insert(
                    at,
                    LeafReport {
                        page_bytes: page.len,
                        ..LeafReport::default()
                    },
                );
                &mut leaves[at]
            }
        };
        class.count += 1;
        class.bytes = class.bytes.saturating_add(covered);
        if covered < page.len {
            let text = format!(
                "is marked as part of a leaf of {}, of which only {} entries are marked",
                runs::Bytes(page.len),
                runs::Bytes(covered)
            );
            self.find(&entry, FindingKind::Group, Severity::Wrong, &text);
        }
    }

    fn end_run(&mut self) {
        let Some((run, prot, pages_bytes)) = self.run.take() else {
            return;
        };
        self.survey.run_count += 1;
        if self.survey.runs.len() < self.limits.runs {
            self.survey.runs.push(RunReport {
                iova: run.iova,
                pa: run.pa,
                bytes: run.len,
                prot: prot.to_string(),
                pages_bytes,
            });
        }
    }

    /// The table that the scan is in is over.
    fn close(&mut self) {
        self.end_leaf();
        let Some(open) = self.open.pop() else {
            return;
        };
        self.tree.close(self.open.len() + 1);
        let Some(by) = open.by else {
            return;
        };
        if open.present == 0 {
            self.survey.waste.empty_tables += 1;
            self.survey.waste.empty_bytes += open.bytes;
            let text = "leads to a table without an entry that is present";
            self.find(&by, FindingKind::Empty, Severity::Note, &text);
        }
        if open.whole.is_some_and(|(run, _)| {
            run.len == 1 << by.log2
                && run.pa & (run.len - 1) == 0
                && self.has_leaf(by.level, run.len)
        }) {
            self.survey.waste.mergeable_tables += 1;
            self.survey.waste.mergeable_bytes += open.bytes;
        }
    }

    /// Returns true if an entry at `level` can be a leaf of `bytes`.
    fn has_leaf(&self, level: u8, bytes: u64) -> bool {
        let geometry = self.geometry.as_ref();
        let level = geometry.and_then(|geometry| geometry.levels.get(usize::from(level)));
        level
            .map_or(PageSizes::NONE, |level| level.leaves)
            .contains(bytes)
    }

    /// An entry of which the tree has a line, too.
    fn wrong(&mut self, entry: &Visited, kind: FindingKind, text: &dyn Display) {
        self.find(entry, kind, Severity::Wrong, text);
        self.tree.fault(self.open.len(), entry, text);
    }

    fn find(&mut self, entry: &Visited, kind: FindingKind, severity: Severity, text: &dyn Display) {
        self.survey.finding_count += 1;
        if self.survey.findings.len() < self.limits.findings {
            self.survey.findings.push(Finding {
                severity,
                kind,
                iova: entry.iova,
                table: entry.table,
                level: entry.level,
                index: entry.index,
                word: entry.word,
                text: text.to_string(),
            });
        }
    }

    fn finish(mut self, tables: &Tables<'_>) -> Survey {
        while !self.open.is_empty() {
            self.close();
        }
        self.end_run();
        if let Some(stored) = tables.stored().filter(|_| self.survey.complete) {
            let unlinked = stored.saturating_sub(self.reached.len() as u64);
            self.survey.waste.unlinked_tables = Some(unlinked);
            if unlinked > 0 {
                self.survey.finding_count += 1;
                self.survey.findings.push(Finding {
                    severity: Severity::Wrong,
                    kind: FindingKind::Unlinked,
                    iova: 0,
                    table: tables.root().address,
                    level: tables.root().levels.saturating_sub(1),
                    index: 0,
                    word: 0,
                    text: format!("to {unlinked} of the image's tables no entry leads"),
                });
            }
        }
        self.survey.tree = self.tree.into_lines();
        self.survey
    }
}

/// Both as one run, where the second continues the first in both address spaces.
fn join(run: Run, next: Run) -> Option<Run> {
    let continues = run.iova.checked_add(run.len) == Some(next.iova)
        && run.pa.checked_add(run.len) == Some(next.pa);
    let len = run.len.checked_add(next.len)?;
    continues.then_some(Run { len, ..run })
}
