//! Quiet points: no access is under way, and everything is compared with the shadow model.

use std::fs;
use std::time::Duration;

use hostmem::{Counter, Limits};
use ioas::Cause;
use iommu::Fault;
use iopt::Prot;
use iopt::walk::{Access, Walker};

use crate::model::Page;
use crate::world::{World, address};
use crate::{IOVA, MEMORY_PAGES, PAGE, PAGES};

/// What is counted at a quiet point.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Since the begin.
    pub at: Duration,
    /// Operations so far.
    pub operations: u64,
    /// Accesses of devices so far that found what they were to find.
    pub accesses: u64,
    /// Areas.
    pub areas: u64,
    /// Domains.
    pub domains: u64,
    /// Bytes that are pinned.
    pub pinned: u64,
    /// Bytes that are charged.
    pub charged: u64,
    /// Table pages in use, those set aside among them.
    pub tables: u64,
    /// What the kernel counts as locked, more than at the begin.
    pub locked: u64,
    /// And as pinned.
    pub kernel_pinned: u64,
    /// Anonymous memory of this process.
    pub anonymous: u64,
    /// Open files.
    pub files: u64,
    /// Everything was given back before: nothing is to be in use.
    pub cleared: bool,
}

/// What the kernel counts for this process.
pub(crate) fn kernel() -> Result<(u64, u64), Cause> {
    let locked = Limits::in_use(Counter::MmLockedVm)?.known;
    let pinned = Limits::in_use(Counter::PinnedVm)?.known;
    Ok((locked, pinned))
}

fn anonymous() -> Result<u64, Cause> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let number = line.and_then(|line| line.trim().strip_suffix(" kB"));
    Ok(number.ok_or("no RssAnon")?.trim().parse::<u64>()? << 10)
}

impl World {
    /// Compares everything, and counts. What is wrong is a complaint.
    pub(crate) fn look(&mut self, begun: (u64, u64)) -> Result<Sample, Cause> {
        self.faults.disarm();
        let flushed = self.space.flush();
        if let Err(cause) = flushed {
            self.scene.complain(format!("flush: {cause}"));
        }
        self.settle([]);
        let mut wrong = Vec::new();
        let scene = std::sync::Arc::clone(&self.scene);
        let quiet = scene.quiet();
        self.look_at_tables(&mut wrong);
        self.look_at_areas(&mut wrong);
        let held = self.look_at_pins(&mut wrong);
        let (locked, kernel_pinned) = kernel()?;
        let (locked, kernel_pinned) = (
            locked.saturating_sub(begun.0),
            kernel_pinned.saturating_sub(begun.1),
        );
        // One of them counts, by how memory is pinned.
        if locked.max(kernel_pinned) != held {
            wrong.push(format!(
                "{held} bytes are pinned, and the kernel counts {locked} locked and {kernel_pinned} pinned"
            ));
        }
        for unit in &self.units {
            // Holes were probed; nobody else reads the log.
            iommu::Unit::drain_faults(unit, &mut |_: Fault| ());
        }
        drop(quiet);
        wrong.into_iter().for_each(|text| scene.complain(text));
        Ok(Sample {
            areas: self.space.len() as u64,
            domains: self.space.places().len() as u64,
            operations: self.operations,
            accesses: scene.found.load(std::sync::atomic::Ordering::Relaxed),
            pinned: held,
            charged: self.ledger.in_use(),
            tables: self.tables.arena.in_use(),
            locked,
            kernel_pinned,
            anonymous: anonymous()?,
            files: fs::read_dir("/proc/self/fd")?.count() as u64,
            ..Sample::default()
        })
    }

    /// Every page of every domain, by the independent walker.
    fn look_at_tables(&self, wrong: &mut Vec<String>) {
        let unit = self.units.first().map(|unit| unit.tables());
        let mut tables = 0;
        self.space.tables(|id, table| {
            tables += table.tables();
            let walker = Walker::new(table.root());
            let Some(memory) = unit else { return };
            let walk = |page: usize| {
                let iova = IOVA + page as u64 * PAGE;
                let found = walker.walk(memory, iova, Access::Read, &mut ());
                found.ok().map(|found| (found.pa, found.prot & Prot::RW))
            };
            for page in 0..PAGES {
                let expected = self.model.pages[page].filter(Page::is_there);
                let expected = expected.map(|page| (address(page.memory), rights(page)));
                let found = walk(page);
                if found != expected {
                    let iova = IOVA + page as u64 * PAGE;
                    wrong.push(format!(
                        "domain {} leads {iova:#x} to {found:x?}, and not to {expected:x?}",
                        id.0
                    ));
                    break;
                }
            }
        });
        let in_use = self.tables.arena.in_use();
        let released = self.model.pages.iter().flatten().any(|page| page.released);
        if in_use < tables || (in_use > tables && !released) {
            wrong.push(format!(
                "{in_use} tables are in use, and domains have {tables}"
            ));
        }
    }

    /// The areas are what the model has, no more and no less.
    fn look_at_areas(&self, wrong: &mut Vec<String>) {
        let mut seen = 0;
        for area in self.space.areas() {
            let number = self
                .memories
                .iter()
                .position(|memory| std::sync::Arc::ptr_eq(memory, area.memory()));
            let pages = MEMORY_PAGES / self.memories.len() * number.unwrap_or(usize::MAX >> 20);
            let first = pages as u64 + area.part().start / PAGE;
            for (n, page) in Self::pages_of(area.range()).enumerate() {
                let found = Page {
                    memory: (first + n as u64) as u32,
                    write: area.prot().contains(Prot::WRITE),
                    out: area.is_out(),
                    released: area.is_released(),
                };
                seen += 1;
                if self.model.pages[page] != Some(found) {
                    let expected = self.model.pages[page];
                    wrong.push(format!("page {page} is {found:?}, and not {expected:?}"));
                    break;
                }
            }
        }
        let expected = self.model.pages.iter().flatten().count();
        if seen != expected {
            wrong.push(format!("areas have {seen} pages, and not {expected}"));
        }
    }

    /// Each page is pinned and charged when it is to be. Returns the bytes that are pinned.
    fn look_at_pins(&self, wrong: &mut Vec<String>) -> u64 {
        let [pinned, least, most] = self.model.held();
        let differs = self.physical.pinned().zip(&pinned).enumerate();
        let mut differs = differs.filter(|(_, (found, expected))| found != *expected);
        if let Some((page, (found, expected))) = differs.next() {
            wrong.push(format!(
                "page {page} of memory: pinned is {found}, and not {expected}; {} more",
                differs.count()
            ));
        }
        let bytes = |pages: &[bool]| pages.iter().filter(|page| **page).count() as u64 * PAGE;
        let (in_use, least, most) = (self.ledger.in_use(), bytes(&least), bytes(&most));
        if !(least..=most).contains(&in_use) {
            wrong.push(format!(
                "{in_use} bytes are charged, and not {least} to {most}"
            ));
        }
        let stray = self.physical.stray();
        if stray > 0 {
            wrong.push(format!("{stray} accesses to memory that nobody has pinned"));
        }
        bytes(&pinned)
    }
}

fn rights(page: Page) -> Prot {
    if page.write { Prot::RW } else { Prot::READ }
}
