//! The same operations on both sides, and a comparison after each.

mod sequences;

use std::fmt::Write as _;

use anyhow::{Context as _, bail, ensure};
use iopt::format::Above;
use iopt::{Format, Gather, NoRuns, Prot, Table, TableMapError, TableOps as _, TableUnmapError};
use runs::{Iova, Pa, PageSizes, Span};

use crate::compare::{Counts, compare};
use crate::differences::{Difference, Kind, Seen};
use crate::server::Server;
use crate::setup::{Heap, Setup, flag, spans};
use fastrand::Rng;

/// How much is done.
#[derive(Clone, Copy, Debug)]
pub struct Amount {
    /// The seed of the first random sequence; the next one's is one more.
    pub seed: u64,
    /// Random sequences of each setup.
    pub sequences: u64,
    /// Operations of a sequence.
    pub operations: u64,
}

/// Record of a comparison.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Requests that both sides took.
    pub taken: u64,
    /// Requests that both sides refused.
    pub refused: u64,
    /// Translations that were compared.
    pub translations: u64,
    /// Comparisons of whole trees, and what was in them.
    pub trees: u64,
    /// Entries that were compared.
    pub counts: Counts,
    /// Differences that were seen.
    pub seen: Seen,
}

impl Outcome {
    /// Adds what another part of the run did.
    pub fn add(&mut self, other: &Self) {
        self.taken += other.taken;
        self.refused += other.refused;
        self.translations += other.translations;
        self.trees += other.trees;
        self.counts.leaves += other.counts.leaves;
        self.counts.tables += other.counts.tables;
        self.seen.add(&other.seen);
    }
}

/// Drives one setup: all sizes and permissions first, then random sequences.
pub fn drive<F: Format, A: Heap>(
    setup: &Setup,
    format: F,
    server: &mut Server,
    amount: &Amount,
) -> anyhow::Result<Outcome> {
    let mut outcome = Outcome::default();
    let memory = A::room_for(1 << 12, format.output_bits())?;
    let mut random = Rng::with_seed(amount.seed);
    let mut pair = Pair::<F, A>::new(setup, format, &memory, server, &mut random)?;
    pair.sizes_are_explained()?;
    pair.addresses_outside_are_refused()?;
    let prots = pair.permissions()?;
    pair.every_size(&prots, &mut random)
        .context("every size with every permission")?;
    outcome.add(&pair.finish()?);
    for seed in amount.seed..amount.seed + amount.sequences {
        let mut random = Rng::with_seed(seed);
        let mut pair = Pair::<F, A>::new(setup, format, &memory, server, &mut random)?;
        for _ in 0..amount.operations {
            if let Err(error) = pair.random_operation(&prots, &mut random) {
                let log = pair.log.join("\n    ");
                return Err(error.context(format!("seed {seed}:\n    {log}\n")));
            }
        }
        let done = pair.finish().with_context(|| format!("seed {seed}"))?;
        outcome.add(&done);
    }
    Ok(outcome)
}

/// Permissions that both sides can express: Linux's flags and ours.
type Prots = Vec<(u32, Prot)>;

/// A table on both sides.
struct Pair<'a, F, A: Heap> {
    setup: &'a Setup,
    memory: &'a A,
    table: Table<F, &'a A>,
    server: &'a mut Server,
    sizes: Vec<u64>,
    spans: Vec<Span<Iova>>,
    /// Where random operations happen.
    places: Vec<u64>,
    log: Vec<String>,
    done: Outcome,
}

impl<'a, F: Format, A: Heap> Pair<'a, F, A> {
    fn new(
        setup: &'a Setup,
        format: F,
        memory: &'a A,
        server: &'a mut Server,
        random: &mut Rng,
    ) -> anyhow::Result<Self> {
        // Linux's tables lie anywhere in the address space, in steps of the pool's size.
        let steps = 1u64 << (format.output_bits() - 28);
        let base = random.u64(..steps) << 28;
        let sizes = server.create(&setup.linux, base)?;
        server.take_complaints();
        let table = Table::with_page_sizes(format, memory, PageSizes::from_bits(sizes))?;
        let sizes: Vec<u64> = table.page_sizes().iter().collect();
        let spans = spans(&format, &setup.linux);
        let mut pair = Self {
            setup,
            memory,
            table,
            server,
            sizes,
            spans,
            places: Vec::new(),
            log: Vec::new(),
            done: Outcome::default(),
        };
        pair.places = pair.choose_places(random);
        pair.check()?;
        Ok(pair)
    }

    /// The bottom, the top, and some boundaries of tables between.
    fn choose_places(&self, random: &mut Rng) -> Vec<u64> {
        let mut places = Vec::new();
        for span in &self.spans {
            places.push(span.start);
            places.push(
                span.start
                    .wrapping_add(span.len)
                    .wrapping_sub(self.window()),
            );
            let middle = random.u64(..span.len) & !(self.largest() - 1);
            places.push(span.start.wrapping_add(middle));
        }
        places
    }

    fn smallest(&self) -> u64 {
        self.sizes.first().copied().unwrap_or(1)
    }

    fn largest(&self) -> u64 {
        self.sizes.last().copied().unwrap_or(1)
    }

    /// Bytes behind a place where operations happen: some thousand of the smallest pages.
    fn window(&self) -> u64 {
        self.smallest() * 4096
    }

    fn config_rows(&self) -> impl Iterator<Item = &'static Difference> + use<'a, F, A> {
        Difference::of(&self.setup.linux)
    }

    /// Compares the trees.
    fn check(&mut self) -> anyhow::Result<()> {
        let dump = self.server.dump()?;
        let counts = compare(
            &self.setup.linux,
            &self.table.format(),
            self.table.root(),
            self.memory,
            &dump,
            &mut self.done.seen,
        )?;
        self.done.trees += 1;
        self.done.counts.leaves += counts.leaves;
        self.done.counts.tables += counts.tables;
        Ok(())
    }

    /// Compares what is behind the addresses at and around the ends of a range.
    fn translate(&mut self, range: Span<Iova>, random: &mut Rng) -> anyhow::Result<()> {
        let last = range.start.wrapping_add(range.len - 1);
        let inside = range.start.wrapping_add(random.u64(..range.len));
        let around = [range.start.wrapping_sub(1), last.wrapping_add(1)];
        for iova in [range.start, inside, last].into_iter().chain(around) {
            // One of Linux's walkers adds one to the address.
            if iova == u64::MAX || !self.spans.iter().any(|span| span.contains(iova)) {
                continue;
            }
            let ours = self.table.translate(iova);
            let theirs = self.server.translate(iova)?;
            // To Linux 0 is "nothing".
            ensure!(
                ours.unwrap_or(0) == theirs,
                "{iova:#x} leads to {ours:x?}, and to {theirs:#x} in Linux"
            );
            self.done.translations += 1;
        }
        Ok(())
    }

    /// Checks after a request that both sides took.
    fn taken(&mut self) -> anyhow::Result<()> {
        let complaints = self.server.take_complaints();
        ensure!(complaints == 0, "Linux's code complained: {complaints}");
        self.done.taken += 1;
        self.check()
    }

    /// Checks after a request that both sides refused: all is as before.
    fn refused(&mut self) -> anyhow::Result<()> {
        // io-pgtable complains of what its callers ask for.
        self.server.take_complaints();
        self.done.refused += 1;
        self.check()
    }

    fn our_unmap(&mut self, range: Span<Iova>) -> Result<(), TableUnmapError> {
        let mut gather = Gather::new();
        self.table.unmap(range, &mut gather, &mut NoRuns)?;
        if let Ok(flushed) = gather.flush_with(|_| Ok::<_, ()>(())) {
            self.table.reclaim(flushed);
        }
        Ok(())
    }

    /// Maps runs on both sides; Linux's core maps one after the other, and undoes them together.
    fn map(&mut self, iova: u64, runs: &[Span<Pa>], flags: u32, prot: Prot) -> anyhow::Result<()> {
        let mut line = format!("map {iova:#x} {flags:#x} ({prot}):");
        for run in runs {
            let _ = write!(line, " {run}");
        }
        self.log.push(line);
        match self.table.map(iova, runs, prot) {
            Ok(()) => {
                let (at, errno) = self.linux_map(iova, runs, flags)?;
                ensure!(errno == 0, "Linux refuses it: errno {errno} at {at:#x}");
                self.taken()
            }
            Err(TableMapError::Overlap { .. }) => {
                // io-pgtable frees a table where a larger leaf goes, whatever it maps.
                let len: u64 = runs.iter().map(|run| run.len).sum();
                if !self.setup.linux.format.takes_ranges() && len >= self.second_size() {
                    self.log.push("  not asked of Linux".to_owned());
                    return Ok(());
                }
                let (at, errno) = self.linux_map(iova, runs, flags)?;
                ensure!(errno != 0, "we refuse the overlap, Linux does not");
                let done = at - iova;
                if done > 0 {
                    let undone = self.server.unmap(iova, done)?;
                    ensure!(undone == done, "Linux undid {undone:#x} of {done:#x}");
                }
                self.refused()
            }
            Err(other) => bail!("we refuse it: {other}"),
        }
    }

    fn second_size(&self) -> u64 {
        self.sizes.get(1).copied().unwrap_or(u64::MAX)
    }

    /// Maps run after run in Linux: where it stopped, and the errno.
    fn linux_map(
        &mut self,
        iova: u64,
        runs: &[Span<Pa>],
        flags: u32,
    ) -> anyhow::Result<(u64, u64)> {
        let mut at = iova;
        for run in runs {
            let errno = self.server.map(at, run.start, run.len, flags)?;
            if errno != 0 {
                return Ok((at, errno));
            }
            at = at.wrapping_add(run.len);
        }
        Ok((at, 0))
    }

    /// Unmaps a range on both sides.
    fn unmap(&mut self, range: Span<Iova>) -> anyhow::Result<()> {
        self.log.push(format!("unmap {range}"));
        let first = match self.our_unmap(range) {
            Ok(()) => {
                let bytes = self.server.unmap(range.start, range.len)?;
                ensure!(bytes == range.len, "Linux unmapped {bytes:#x} bytes");
                return self.taken();
            }
            Err(TableUnmapError::Hole { at, .. }) => at == range.start,
            Err(TableUnmapError::InsideLeaf { leaf, .. }) => leaf.iova != range.start,
            Err(other) => bail!("we refuse it: {other}"),
        };
        // Linux unmaps up to where it comes to a stop, and whole leaves. So it refuses a request
        // only for its first address; io-pgtable looks at no more than one entry, of the size that
        // it is given.
        let first =
            first && (self.setup.linux.format.takes_ranges() || range.len < self.second_size());
        if !first || self.cut_at_start(range) {
            self.log.push("  not asked of Linux".to_owned());
            return Ok(());
        }
        let bytes = self.server.unmap(range.start, range.len)?;
        ensure!(
            bytes == 0,
            "we refuse it, and Linux unmapped {bytes:#x} bytes"
        );
        self.refused()
    }

    /// True when a leaf begins with the range but is longer: Linux unmaps all of it.
    fn cut_at_start(&self, range: Span<Iova>) -> bool {
        self.table
            .leaf_at(range.start)
            .is_some_and(|leaf| leaf.run.iova == range.start)
    }

    /// The sizes that Linux leaves out are those that the list says.
    fn sizes_are_explained(&mut self) -> anyhow::Result<()> {
        let format = self.table.format();
        let all = F::page_sizes(format.levels()).bits();
        let used = self.table.page_sizes().bits();
        let mut left_out = all & !used;
        for row in self.config_rows() {
            if let Kind::Sizes(sizes) = row.kind {
                let sizes = sizes(&self.setup.linux) & all;
                ensure!(
                    sizes & used == 0,
                    "Linux uses {:#x}: {}",
                    sizes & used,
                    row.name
                );
                if sizes & left_out != 0 {
                    self.done.seen.note(row.name);
                }
                left_out &= !sizes;
            }
        }
        ensure!(left_out == 0, "Linux does not use the sizes {left_out:#x}");
        Ok(())
    }

    /// Addresses outside the aperture, and output addresses that an entry cannot hold.
    fn addresses_outside_are_refused(&mut self) -> anyhow::Result<()> {
        let page = self.smallest();
        let format = self.table.format();
        let (aperture, output_bits) = (format.aperture(), format.output_bits());
        let mut outside = Vec::new();
        match aperture.above {
            Above::Zeros if aperture.bits < 64 => outside.push(1 << aperture.bits),
            Above::Ones => outside.extend([0, 0u64.wrapping_sub(1 << aperture.bits) - page]),
            Above::Sign => outside.extend([1 << (aperture.bits - 1), 1 << aperture.bits]),
            Above::Zeros => {}
        }
        let flags = flag::READ | flag::WRITE | flag::CACHE | flag::NOEXEC;
        let prot = self.setup.prot(flags);
        for iova in outside {
            let ours = self.table.map(iova, &[Span::new(page, page)], prot);
            ensure!(
                matches!(ours, Err(TableMapError::Range(_))),
                "{iova:#x}: {ours:?}"
            );
            if self.server.map(iova, page, page, flags)? == 0 {
                let row = self
                    .config_rows()
                    .find(|row| matches!(row.kind, Kind::TakesAnyInput));
                let row = row.with_context(|| format!("Linux maps {iova:#x}"))?;
                self.done.seen.note(row.name);
                // Entries behind the used part of the root are not compared, so the page goes.
                ensure!(self.server.unmap(iova, page)? == page, "{iova:#x}");
                self.server.take_complaints();
                return self.begin_anew();
            }
            self.refused()?;
        }
        let (iova, beyond) = (
            self.spans.first().map_or(0, |span| span.start),
            1 << output_bits,
        );
        let ours = self.table.map(iova, &[Span::new(beyond, page)], prot);
        ensure!(
            matches!(ours, Err(TableMapError::OutputTooWide { .. })),
            "{ours:?}"
        );
        let errno = self.server.map(iova, beyond, page, flags)?;
        ensure!(errno != 0, "Linux maps {beyond:#x}");
        self.refused()
    }

    /// A new, empty table in Linux.
    fn begin_anew(&mut self) -> anyhow::Result<()> {
        self.server.destroy()?;
        self.server.create(&self.setup.linux, 1 << 28)?;
        self.server.take_complaints();
        self.check()
    }

    /// All combinations of Linux's flags: which both sides express, and that each refusal of one
    /// side alone is in the list.
    fn permissions(&mut self) -> anyhow::Result<Prots> {
        let page = self.smallest();
        let iova = self.spans.first().map_or(0, |span| span.start);
        let mut both = Vec::new();
        for flags in 0..flag::END {
            let prot = self.setup.prot(flags);
            let ours = self.table.format().leaf_bits(prot).is_some();
            let theirs = self.server.map(iova, page, page, flags)? == 0;
            if theirs {
                ensure!(self.server.unmap(iova, page)? == page, "flags {flags:#x}");
            }
            self.server.take_complaints();
            let reasons: Vec<&str> = self
                .config_rows()
                .filter(|row| match row.kind {
                    Kind::WeRefuse(of) => of(flags) && theirs,
                    Kind::LinuxRefuses(of) => of(flags) && ours,
                    _ => false,
                })
                .map(|row| row.name)
                .collect();
            let what =
                || format!("flags {flags:#x} ({prot}), ours {ours}, Linux {theirs}: {reasons:?}");
            match (ours == theirs, reasons.as_slice()) {
                (true, []) if ours => both.push((flags, prot)),
                (true, []) => self.done.refused += 1,
                (true, _) => bail!("in the list as refused: {}", what()),
                (false, []) => bail!("refused by one side alone: {}", what()),
                // Only a reason that stands alone shows that it is one.
                (false, [one]) => self.done.seen.note(one),
                (false, _) => {}
            }
        }
        ensure!(!both.is_empty(), "no permissions that both sides express");
        self.check()?;
        Ok(both)
    }

    /// Every size with every permission, at lowest, highest and random output addresses.
    fn every_size(&mut self, prots: &Prots, random: &mut Rng) -> anyhow::Result<()> {
        let output = 1u64 << self.table.format().output_bits();
        for size in self.sizes.clone() {
            for (flags, prot) in prots {
                for kind in 0..3 {
                    let Some(iova) = self.aligned(size, random) else {
                        continue;
                    };
                    let pa = match kind {
                        0 => 0,
                        1 => output - size,
                        _ => random.u64(..output) & !(size - 1),
                    };
                    self.log.clear();
                    self.map(iova, &[Span::new(pa, size)], *flags, *prot)
                        .and_then(|()| self.translate(Span::new(iova, size), random))
                        .and_then(|()| self.unmap(Span::new(iova, size)))
                        .with_context(|| self.log.join("; "))?;
                }
            }
        }
        Ok(())
    }

    /// An input address with room for a page of `size` bytes.
    fn aligned(&self, size: u64, random: &mut Rng) -> Option<u64> {
        let span = random.choice(&self.spans)?;
        if span.len < size {
            return None;
        }
        let offset = random.u64(..span.len) & !(size - 1);
        Some(span.start.wrapping_add(offset))
    }

    /// Takes both tables down; all memory must come back.
    fn finish(self) -> anyhow::Result<Outcome> {
        let (gather, memory) = self.table.tear_down();
        memory.reclaim(gather.never_walked().into_tables());
        self.server.destroy()?;
        Ok(self.done)
    }
}
