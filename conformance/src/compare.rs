//! The comparator: two trees of tables, walked side by side from their roots.
//!
//! Leaves must be equal bit for bit. An entry that leads to a table must be what the format makes
//! of that table's address, on both sides; then the tables are compared. Every block of Linux's
//! memory must be reached, and once. What may differ is said by the [`Difference`]s that apply to
//! the table, and by nothing else.

use std::collections::BTreeSet;

use anyhow::{Context as _, bail, ensure};
use iopt::Format;
use iopt::format::{Entry, Root};

use crate::differences::{Difference, Kind, Seen};
use crate::server::{Block, Dump, LinuxConfig};

/// Words of our table memory.
pub trait Words {
    /// The entry at an address.
    fn word(&self, address: u64) -> Option<u64>;
}

/// Compared entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Entries that hold leaves.
    pub leaves: u64,
    /// Entries that lead to tables, on both sides.
    pub tables: u64,
}

/// One comparison under way.
struct Walk<'a, F> {
    format: &'a F,
    ours: &'a dyn Words,
    theirs: &'a Dump,
    differences: Vec<&'static Difference>,
    reached: BTreeSet<u64>,
    counts: Counts,
    seen: &'a mut Seen,
}

/// Compares our tables from `root` on with Linux's.
pub fn compare<F: Format>(
    config: &LinuxConfig,
    format: &F,
    root: Root,
    ours: &dyn Words,
    theirs: &Dump,
    seen: &mut Seen,
) -> anyhow::Result<Counts> {
    let mut walk = Walk {
        format,
        ours,
        theirs,
        differences: Difference::of(config).collect(),
        reached: BTreeSet::new(),
        counts: Counts::default(),
        seen,
    };
    walk.roots(root)?;
    if let Some(address) = theirs.blocks.keys().find(|at| !walk.reached.contains(at)) {
        bail!("nothing leads to Linux's table at {address:#x}");
    }
    Ok(walk.counts)
}

impl<'a, F: Format> Walk<'a, F> {
    fn roots(&mut self, root: Root) -> anyhow::Result<()> {
        let mut level = usize::from(root.levels) - 1;
        let mut table = Some(root.address);
        // A top that grows: the levels that are not there yet would hold one entry, the first.
        let top = self
            .theirs
            .levels
            .map_or(level, |levels| usize::from(levels) - 1);
        ensure!(top <= level, "Linux's table has more levels: {}", top + 1);
        while level > top {
            self.note_if(|kind| matches!(kind, Kind::GrowingTop))
                .context("Linux's table has fewer levels")?;
            if let Some(ours) = table {
                for index in 1..self.format.entries(level) as u64 {
                    let word = self.our_word(ours, index)?;
                    ensure!(F::is_empty(word), "entry {index} leads beyond Linux's top");
                }
                table = match F::decode(level, self.our_word(ours, 0)?) {
                    Entry::Table(below) => Some(below),
                    Entry::Empty => None,
                    Entry::Leaf { .. } => bail!("a leaf above Linux's top"),
                };
            }
            level -= 1;
        }
        let entries = self.format.entries(level) as u64;
        let roots = &self.theirs.roots;
        let per = entries / (roots.len() as u64).max(1);
        ensure!(
            per > 0 && per * roots.len() as u64 == entries,
            "the root has {entries} entries, and Linux has {} roots",
            roots.len()
        );
        for (nth, root) in (0..).zip(roots) {
            let block = self.block(*root, per)?;
            let Some(ours) = table else {
                self.bare(level, block, per)?;
                continue;
            };
            let ours = ours + nth * per * F::ENTRY_BYTES as u64;
            self.table(level, ours, block, per)
                .with_context(|| format!("in root {nth}"))?;
        }
        Ok(())
    }

    /// Notes the first difference of this kind; `None` where none applies.
    fn note_if(&mut self, kind: impl Fn(&Kind) -> bool) -> Option<()> {
        let row = self.differences.iter().find(|row| kind(&row.kind))?;
        self.seen.note(row.name);
        Some(())
    }

    fn our_word(&self, table: u64, index: u64) -> anyhow::Result<u64> {
        let address = table + index * F::ENTRY_BYTES as u64;
        self.ours
            .word(address)
            .with_context(|| format!("our table at {table:#x} lies outside our memory"))
    }

    /// Linux's block at `address`, which holds so many entries and nothing behind them.
    fn block(&mut self, address: u64, entries: u64) -> anyhow::Result<&'a Block> {
        let block = self
            .theirs
            .blocks
            .get(&address)
            .with_context(|| format!("Linux has no table at {address:#x}"))?;
        ensure!(
            block.bytes >= entries * F::ENTRY_BYTES as u64,
            "Linux's table at {address:#x} is too small: {:#x} bytes",
            block.bytes
        );
        if let Some((index, word)) = block.words.range(entries..).next() {
            bail!("entry {index} of Linux's table at {address:#x} lies behind it: {word:#x}");
        }
        ensure!(
            self.reached.insert(address),
            "two entries lead to Linux's table at {address:#x}"
        );
        Ok(block)
    }

    fn table(
        &mut self,
        level: usize,
        ours: u64,
        theirs: &Block,
        entries: u64,
    ) -> anyhow::Result<()> {
        for index in 0..entries {
            let our_word = self.our_word(ours, index)?;
            let their_word = theirs.words.get(&index).copied().unwrap_or(0);
            if our_word != 0 || their_word != 0 {
                self.entry(level, our_word, their_word)
                    .with_context(|| format!("level {level}, entry {index}"))?;
            }
        }
        Ok(())
    }

    fn entry(&mut self, level: usize, ours: u64, theirs: u64) -> anyhow::Result<()> {
        match F::decode(level, ours) {
            Entry::Leaf { .. } => {
                self.leaf(ours, theirs)?;
                self.counts.leaves += 1;
            }
            Entry::Table(table) => {
                let entry = self.format.table(level, table);
                ensure!(
                    ours == entry,
                    "our entry is {ours:#x}, of a table {entry:#x}"
                );
                let below = self.their_table(level, theirs)?;
                let entries = self.format.entries(level - 1) as u64;
                self.table(level - 1, table, below, entries)?;
                self.counts.tables += 1;
            }
            Entry::Empty => {
                ensure!(ours == 0, "our entry is not present, and not 0: {ours:#x}");
                self.empty(level, theirs)?;
            }
        }
        Ok(())
    }

    /// Linux's leaf is ours, but for the differences.
    fn leaf(&mut self, ours: u64, theirs: u64) -> anyhow::Result<()> {
        let mut expected = ours;
        let mut used = Vec::new();
        let mut optional = None;
        for row in &self.differences {
            match row.kind {
                Kind::Leaf(of) if of(expected) != expected => {
                    expected = of(expected);
                    used.push(row.name);
                }
                Kind::LeafOrSame(of) if of(expected) != expected => optional = Some((of, row.name)),
                _ => {}
            }
        }
        if let Some((of, name)) = optional
            && theirs != expected
        {
            expected = of(expected);
            used.push(name);
        }
        ensure!(
            theirs == expected,
            "a leaf: ours {ours:#018x}, Linux's {theirs:#018x}, expected {expected:#018x} ({})",
            if used.is_empty() {
                "no difference applies".to_owned()
            } else {
                used.join("; ")
            }
        );
        used.iter().for_each(|name| self.seen.note(name));
        Ok(())
    }

    /// The table that Linux's entry leads to. But for the address and the differences, the entry
    /// is what the format makes of it.
    fn their_table(&mut self, level: usize, theirs: u64) -> anyhow::Result<&'a Block> {
        let Entry::Table(table) = F::decode(level, theirs) else {
            bail!("we have a table here, and Linux {theirs:#x}");
        };
        let mut expected = self.format.table(level, table);
        for row in &self.differences {
            if let Kind::Table(of) = row.kind
                && of(expected) != expected
            {
                expected = of(expected);
                self.seen.note(row.name);
            }
        }
        ensure!(
            theirs == expected,
            "an entry of a table: Linux's {theirs:#018x}, expected {expected:#018x}"
        );
        self.block(table, self.format.entries(level - 1) as u64)
    }

    /// We have nothing here; Linux may have a table that maps nothing.
    fn empty(&mut self, level: usize, theirs: u64) -> anyhow::Result<()> {
        if theirs == 0 {
            return Ok(());
        }
        ensure!(
            level > 0 && matches!(F::decode(level, theirs), Entry::Table(_)),
            "we have nothing here, and Linux {theirs:#x}"
        );
        self.note_if(|kind| matches!(kind, Kind::KeepsEmptyTables))
            .with_context(|| format!("we have nothing here, and Linux a table: {theirs:#x}"))?;
        let block = self.their_table(level, theirs)?;
        self.bare(level - 1, block, self.format.entries(level - 1) as u64)
    }

    /// A table of Linux that maps nothing.
    fn bare(&mut self, level: usize, block: &Block, entries: u64) -> anyhow::Result<()> {
        for (index, word) in block.words.range(..entries) {
            self.empty(level, *word)
                .with_context(|| format!("level {level}, entry {index}"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
