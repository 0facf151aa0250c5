//! Needs beside what there is.

use crate::draw::sheet::Sheet;
use crate::inspect::{LockCounter, NeedsReport};
use crate::size::{bytes, count, counted};

/// Rows of the section, which begins with the first of them.
struct Rows<'a> {
    sheet: &'a mut Sheet,
    found: &'a NeedsReport,
    begun: bool,
}

/// Writes needs beside what there is, with a mark where that is known.
pub(super) fn needs(sheet: &mut Sheet, found: &NeedsReport) {
    let mut rows = Rows {
        sheet,
        found,
        begun: false,
    };
    rows.pools();
    rows.locked();
    rows.mappings();
    rows.addresses();
    rows.bars();
}

impl Rows<'_> {
    fn row(&mut self, name: &str, enough: Option<bool>, text: &str) {
        if !std::mem::replace(&mut self.begun, true) {
            self.sheet.section("needs");
        }
        let paint = self.sheet.paint();
        let good = |text: &str| paint.good(text);
        let warning = |text: &str| paint.warning(text);
        match enough {
            Some(true) => self.sheet.marked(name, good, "✓", text),
            Some(false) => self.sheet.marked(name, warning, "!", text),
            None => self.sheet.value(name, text),
        }
    }

    /// True if a finding is of this cause, or of this group of causes.
    fn short(&self, cause: &str) -> bool {
        let mut findings = self.found.findings.iter();
        findings.any(|finding| finding.cause.starts_with(cause))
    }

    fn pools(&mut self) {
        for pool in &self.found.pools {
            let nodes: Vec<_> = pool.nodes.iter().map(u32::to_string).collect();
            let nodes = match nodes.is_empty() {
                true => String::new(),
                false => format!(" on node {}", nodes.join(", ")),
            };
            let free = match pool.free_pages {
                Some(free) => format!("{} are free", count(free)),
                None => "free ones are not known".into(),
            };
            let enough = pool.free_pages.map(|_| pool.missing_pages == 0);
            let growth = match pool.growth_pages {
                0 => String::new(),
                growth => format!(", {} more may come", count(growth)),
            };
            let text = format!(
                "{} of {}{nodes}: {free}{growth}",
                counted(pool.needed_pages, "page"),
                bytes(pool.page_bytes)
            );
            self.row("pool", enough, &text);
        }
    }

    fn locked(&mut self) {
        let Some(lock) = &self.found.locked else {
            return;
        };
        let times = match lock.address_spaces {
            1 => String::new(),
            times => format!(
                ", {} in each of {times} address spaces",
                bytes(lock.memory_bytes)
            ),
        };
        let at_most = if lock.at_start { "" } else { "up to " };
        let counter = match lock.counter {
            LockCounter::Process => "mm->locked_vm",
            LockCounter::User => "user->locked_vm",
        };
        let limit = match (lock.limit_of, lock.limit_bytes) {
            (None, _) => "the limit is not known".into(),
            (Some(of), Some(limit)) => format!("{} allowed by {of}", bytes(limit)),
            (Some(of), None) => format!("no limit of {of}"),
        };
        let text = format!(
            "{at_most}{}{times} ({counter}): {limit}",
            bytes(lock.needed_bytes)
        );
        let short = self.short("memlock.too-low") || self.short("memlock.per-device");
        self.row("locked", lock.limit_of.map(|_| !short), &text);
    }

    fn mappings(&mut self) {
        let Some(mappings) = &self.found.mappings else {
            return;
        };
        let pieces: u64 = mappings
            .pieces
            .iter()
            .fold(0, |sum, one| sum.saturating_add(one.count));
        let most = match pieces {
            0 => String::new(),
            pieces => format!(", up to {} more in pieces", count(pieces)),
        };
        let text = format!(
            "{} for RAM{most}: {} allowed",
            count(mappings.ram),
            count(mappings.limit)
        );
        let enough = !self.short("memlock.mapping-limit");
        self.row("mappings", Some(enough), &text);
    }

    fn addresses(&mut self) {
        let Some(ram) = self.found.ram.last() else {
            return;
        };
        let translated = match self.found.last_address {
            Some(last) => format!(": the IOMMU translates up to {last:#x}"),
            None => String::new(),
        };
        let text = format!("RAM up to {:#x}{translated}", ram.last);
        let known = self.found.reserved_ranges > 0 || self.found.last_address.is_some();
        let enough = known.then(|| !self.short("layout."));
        self.row("addresses", enough, &text);
    }

    fn bars(&mut self) {
        let enough = !self.short("start.bar-");
        for (nth, bar) in self.found.bars.iter().enumerate() {
            let name = if nth == 0 { "BARs" } else { "" };
            let text = format!("{} of {}", bytes(bar.bytes), bar.device);
            self.row(name, Some(enough), &text);
        }
    }
}
