//! Checks of a whole world while no access is under way: everything is compared with the shadow model and counted.

use std::sync::Arc;

use hostmem::{Counter, Limits, LimitsError};
use iommu::DomainId;
use iopt::walk::{Access, Walker};
use iopt::{Prot, Root};
use runs::Span;
use shadow::Page;

use super::PAGE;
use super::world::World;

/// Counts of the kernel for this process, as `/proc/self/status` has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Locked memory, `VmLck`.
    pub(crate) locked_bytes: u64,
    /// Pinned memory, `VmPin`.
    pub(crate) pinned_bytes: u64,
}

impl Counted {
    /// Reads the counts.
    ///
    /// # Errors
    ///
    /// When that fails.
    pub(crate) fn now() -> Result<Self, LimitsError> {
        Ok(Self {
            locked_bytes: Limits::in_use(Counter::MmLockedVm)?.known,
            pinned_bytes: Limits::in_use(Counter::PinnedVm)?.known,
        })
    }

    /// Growth since `before`.
    pub(crate) const fn since(self, before: Self) -> Self {
        Self {
            locked_bytes: self.locked_bytes.saturating_sub(before.locked_bytes),
            pinned_bytes: self.pinned_bytes.saturating_sub(before.pinned_bytes),
        }
    }

    /// One of them counts, by how memory is pinned.
    pub(crate) const fn most(self) -> u64 {
        if self.locked_bytes > self.pinned_bytes {
            return self.locked_bytes;
        }
        self.pinned_bytes
    }
}

/// Totals of a check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Areas.
    pub(crate) areas: u64,
    /// Domains.
    pub(crate) domains: u64,
    /// Bytes that are to be pinned, and are.
    pub(crate) pinned: u64,
    /// Bytes that are charged, more than before.
    pub(crate) charged: u64,
    /// Table pages in use, those set aside among them.
    pub(crate) tables: u64,
    /// Growth of the kernel's counts.
    pub(crate) kernel: Counted,
}

impl Totals {
    /// True when everything is at zero.
    pub(crate) fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

impl World {
    /// Compares everything, and counts. What is wrong is a complaint.
    ///
    /// # Errors
    ///
    /// When the kernel does not tell what it counts.
    pub(crate) fn check(&mut self) -> Result<Totals, LimitsError> {
        self.faults.disarm();
        if let Err(cause) = self.space.flush() {
            self.scene.complain(format!("flush: {cause}"));
        }
        self.settle();
        let mut wrong = Vec::new();
        let scene = Arc::clone(&self.scene);
        let quiet = scene.quiet();
        let of = |id, table: &iopt::AnyTable| (id, table.root(), table.tables());
        let domains = self.space.tables(of);
        let tables: u64 = domains.iter().map(|(_, _, tables)| tables).sum();
        let in_use = self.hardware.in_use();
        let released = self
            .model()
            .pages
            .iter()
            .flatten()
            .any(|page| page.released);
        if in_use < tables || (in_use > tables && !released) {
            wrong.push(format!(
                "{in_use} tables are in use, and domains have {tables}"
            ));
        }
        let roots = domains.into_iter().map(|(id, root, _)| (id, root));
        self.check_tables(roots, &mut wrong);
        self.check_areas(&mut wrong);
        let (pinned, kernel) = (self.check_pins(&mut wrong), self.kernel()?);
        if kernel.most() != pinned {
            wrong.push(format!(
                "{pinned} bytes are pinned, and the kernel counts {kernel:?}"
            ));
        }
        drop(quiet);
        wrong.into_iter().for_each(|text| scene.complain(text));
        Ok(Totals {
            areas: self.areas(),
            domains: self.space.places().len() as u64,
            pinned,
            charged: self.charged(),
            tables: self.hardware.in_use(),
            kernel,
        })
    }

    /// How many areas there are.
    pub(crate) fn areas(&self) -> u64 {
        self.space.len() as u64
    }

    /// Growth of the kernel's counts for this process.
    pub(crate) fn kernel(&self) -> Result<Counted, LimitsError> {
        Ok(Counted::now()?.since(self.counted))
    }

    /// Growth of the charge.
    pub(crate) fn charged(&self) -> u64 {
        self.ledger.in_use() - self.charged
    }

    /// Every page of every domain, by the independent walker.
    fn check_tables(&self, roots: impl Iterator<Item = (DomainId, Root)>, wrong: &mut Vec<String>) {
        let hardware = &self.hardware;
        for unit in &hardware.units {
            // Holes were probed; nothing else reads the log.
            iommu::Unit::drain_faults(unit, &mut |_| ());
        }
        let address = self.addresses();
        let view = &hardware.tables.arena;
        for (id, root) in roots {
            let walker = Walker::new(root);
            for (page, expected) in self.model().pages.iter().enumerate() {
                let iova = self.scene.base + page as u64 * PAGE;
                let found = walker.walk(view, iova, Access::Read, &mut ());
                let found = found.ok().map(|found| (found.pa, found.prot & Prot::RW));
                let expected = expected.filter(Page::is_there);
                let expected = expected.map(|page| {
                    let at = address.get(page.memory as usize);
                    (at.copied().unwrap_or(u64::MAX), page.prot())
                });
                if found != expected {
                    wrong.push(format!(
                        "domain {} leads {iova:#x} to {found:x?}, and not to {expected:x?}",
                        id.0
                    ));
                    break;
                }
            }
        }
    }

    /// Where each page of all memories lies.
    fn addresses(&self) -> Vec<u64> {
        let parts = self.parts.iter();
        parts
            .flat_map(|part| {
                let pages = (0..part.guest.len).step_by(PAGE as usize);
                pages.map(|offset| part.layout.address(offset))
            })
            .collect()
    }

    /// The areas are what the model has, no more and no less.
    fn check_areas(&self, wrong: &mut Vec<String>) {
        let (model, mut seen) = (self.model(), 0);
        for area in self.space.areas() {
            let mut parts = self.parts.iter();
            let number = parts.position(|part| Arc::ptr_eq(&part.memory, area.memory()));
            let Some(number) = number else {
                wrong.push(format!("{} is of no memory", area.range()));
                continue;
            };
            let memory = self.memory_pages(number, area.part());
            for (page, memory) in self.scene.pages_of(area.range()).zip(memory) {
                let found = Page {
                    memory: memory as u32,
                    write: area.prot().contains(Prot::WRITE),
                    out: area.is_out(),
                    released: area.is_released(),
                };
                seen += 1;
                if model.pages[page] != Some(found) {
                    let expected = model.pages[page];
                    wrong.push(format!("page {page} is {found:?}, and not {expected:?}"));
                    break;
                }
            }
        }
        let expected = model.pages.iter().flatten().count();
        if seen != expected {
            wrong.push(format!("areas have {seen} pages, and not {expected}"));
        }
    }

    /// Each page is pinned and charged when it is to be. Returns the bytes that are to be pinned.
    fn check_pins(&self, wrong: &mut Vec<String>) -> u64 {
        let [pinned, least, most] = self.model().held();
        let hardware = &self.hardware;
        let mut found = vec![false; pinned.len()];
        for (number, offset, len) in hardware.physical.pinned() {
            found[self.memory_pages(number, Span::new(offset, len))].fill(true);
        }
        let differs = found.iter().zip(&pinned).enumerate();
        let mut differs = differs.filter(|(_, (found, expected))| found != expected);
        if let Some((page, (found, expected))) = differs.next() {
            wrong.push(format!(
                "page {page} of memory: pinned is {found}, and not {expected}; {} more",
                differs.count()
            ));
        }
        let stray = hardware.physical.stray();
        if stray > 0 {
            wrong.push(format!("{stray} accesses to memory that is not pinned"));
        }
        let bytes = |pages: &[bool]| pages.iter().filter(|page| **page).count() as u64 * PAGE;
        let (charged, least, most) = (self.charged(), bytes(&least), bytes(&most));
        if !(least..=most).contains(&charged) {
            wrong.push(format!(
                "{charged} bytes are charged, and not {least} to {most}"
            ));
        }
        bytes(&pinned)
    }
}
