//! Looks at areas, pages and the charge, which are those of the shadow.

use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use iopt::Prot;
use shadow::{PAGE, Page};

use super::{HOME, MEMORY, PAGES, World, iova_of, pages_of};

impl World<'_> {
    /// The shadow takes over what the areas say.
    pub(super) fn take_over_areas(&mut self, number: usize) -> anyhow::Result<()> {
        let found = self.of_areas(number)?;
        let space = &mut self.spaces[number];
        for (page, found) in found.into_iter().enumerate() {
            if space.shadow[page] != found {
                space.written[page] = true;
                let led = found.or(space.shadow[page]).map(|page| page.memory);
                space.led[page] = led.or(space.led[page]);
                space.shadow[page] = found;
            }
        }
        Ok(())
    }

    /// Pages as the areas have them.
    fn of_areas(&self, number: usize) -> anyhow::Result<Vec<Option<Page>>> {
        let mut found = vec![None; PAGES as usize];
        for area in self.spaces[number].ioas.areas() {
            if area.range().start >= HOME {
                continue;
            }
            let mut memories = self.memories.iter();
            let memory = memories.position(|memory| Arc::ptr_eq(memory, area.memory()));
            let memory = memory.with_context(|| format!("{} is of no memory", area.range()))?;
            let first = memory as u64 * MEMORY / PAGE + area.part().start / PAGE;
            for (nth, page) in pages_of(area.range()).enumerate() {
                found[page] = Some(Page {
                    memory: first as u32 + nth as u32,
                    write: area.prot().contains(Prot::WRITE),
                    out: area.is_out(),
                    released: area.is_released(),
                });
            }
        }
        Ok(found)
    }

    pub(super) fn look_at_areas(&self) -> anyhow::Result<()> {
        for (number, space) in self.spaces.iter().enumerate() {
            let found = self.of_areas(number)?;
            for (page, (found, expected)) in found.iter().zip(space.shadow.iter()).enumerate() {
                ensure!(
                    found == expected,
                    "page {page} of space {number} is {found:?}, not {expected:?}"
                );
            }
        }
        Ok(())
    }

    /// Every page of every table leads where the shadow says.
    pub(super) fn look_at_pages(&self) -> anyhow::Result<()> {
        for (number, space) in self.spaces.iter().enumerate() {
            let wrong = space.ioas.tables(|domain, table| {
                let pages = space.shadow.iter().enumerate();
                let mut pages = pages.map(|(page, there)| {
                    let there = there.filter(Page::is_there);
                    let leads = there.map(|there| self.address(there.memory));
                    (page, leads, table.translate(iova_of(page)))
                });
                let wrong = pages.find(|(_, leads, found)| leads != found);
                wrong.map(|(page, leads, found)| {
                    format!("domain {domain} leads page {page} to {found:x?}, not {leads:x?}")
                })
            });
            if let Some(wrong) = wrong.into_iter().flatten().next() {
                bail!("space {number}: {wrong}");
            }
        }
        Ok(())
    }

    /// The charge is that of what both address spaces hold of the memory that is pinned.
    pub(super) fn look_at_charge(&self) -> anyhow::Result<()> {
        let [least, most] = self.to_be_charged();
        let waits = self.spaces.iter().any(|space| space.ioas.retired() > 0);
        let found = self.ledger.in_use();
        ensure!(
            least <= found && (found <= most || waits),
            "{found:#x} bytes are charged, not {least:#x} to {most:#x}"
        );
        Ok(())
    }

    /// Bytes that are to be charged, at least and at most.
    pub(super) fn to_be_charged(&self) -> [u64; 2] {
        let mut charged = [0, 0];
        for (nth, charged) in charged.iter_mut().enumerate() {
            let held = self.spaces.iter().map(|space| {
                let live = space.ioas.is_live();
                let [_, least, most] = space.shadow.held(live);
                [least, most][nth].clone()
            });
            let held: Vec<Vec<bool>> = held.collect();
            let pages = (MEMORY / PAGE) as usize;
            let any = |page: &usize| held.iter().any(|held| held[*page]);
            *charged = (0..pages).filter(any).count() as u64 * PAGE;
        }
        charged
    }
}
