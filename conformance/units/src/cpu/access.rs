//! Loads and stores that a processor really does, one at a time.
//!
//! # Protocol
//!
//! A few pages lead to themselves in the table under test: there lie a load, a store and what a fault
//! takes. For an access the debugger stub sets the registers and has the processor do the one
//! instruction. Behind it the program counter stands behind the instruction, or at the handler of page
//! faults, which is never run. Unlike [questions](Processor::translate), an access takes all checks of
//! the walk, goes through the TLB, and sets accessed and dirty bits; so what was unmapped, or had its dirty
//! bits taken, is [flushed](Accesses::flush) before it counts.

use anyhow::{bail, ensure};
use fastrand::Rng;
use iopt::{Format, Gather, Pending, Prot, Table, TableOps as _};
use runs::{Iova, Pa, Span};

use super::processor::{Processor, Tables};

/// A processor whose accesses are translated.
pub(super) struct Accesses<'p> {
    processor: &'p Processor,
    isa: Isa,
    /// How often the processor was made to do one.
    done: std::cell::Cell<u64>,
}

/// Differences between architectures.
pub(super) struct Isa {
    /// Its pages that lead to themselves, and what is allowed there.
    pub(super) pages: Span<Iova>,
    pub(super) prot: Prot,
    /// The load from `address` to `value`, and the store.
    pub(super) code: u64,
    pub(super) load: Vec<u8>,
    pub(super) store: Vec<u8>,
    pub(super) counter: &'static str,
    pub(super) address: &'static str,
    pub(super) value: &'static str,
    /// Where a fault leads.
    pub(super) handler: u64,
    /// Registers that a fault changes.
    pub(super) before: Vec<(&'static str, u64)>,
    pub(super) flush: Flush,
}

/// Invalidation of all translations of a processor.
pub(super) enum Flush {
    /// These writes to registers.
    Registers(Vec<(&'static str, u64)>),
    /// This instruction.
    Instruction(Vec<u8>),
}

impl<'p> Accesses<'p> {
    /// Puts the instructions into memory.
    pub(super) fn new(processor: &'p Processor, isa: Isa) -> anyhow::Result<Self> {
        let accesses = Self {
            processor,
            isa,
            done: std::cell::Cell::new(0),
        };
        let Isa {
            code, load, store, ..
        } = &accesses.isa;
        processor.machine().write(*code, load)?;
        processor.machine().write(code + STORE, store)?;
        if let Flush::Instruction(flush) = &accesses.isa.flush {
            processor.machine().write(code + FLUSH, flush)?;
        }
        Ok(accesses)
    }

    /// The 8 bytes at an address, or `None` where the load faults.
    fn load(&self, address: u64) -> anyhow::Result<Option<u64>> {
        let Isa { code, load, .. } = &self.isa;
        let passed = self.run(
            *code,
            load.len(),
            &[(self.isa.address, address), (self.isa.value, 0)],
        )?;
        passed
            .then(|| self.processor.get(self.isa.value))
            .transpose()
    }

    /// False where the store faults.
    fn store(&self, address: u64, value: u64) -> anyhow::Result<bool> {
        let Isa { code, store, .. } = &self.isa;
        let registers = [(self.isa.address, address), (self.isa.value, value)];
        self.run(*code + STORE, store.len(), &registers)
    }

    /// The processor forgets all translations.
    fn flush(&self) -> anyhow::Result<()> {
        match &self.isa.flush {
            Flush::Registers(writes) => self.processor.set(writes),
            Flush::Instruction(flush) => {
                ensure!(
                    self.run(self.isa.code + FLUSH, flush.len(), &[])?,
                    "a flush has faulted"
                );
                Ok(())
            }
        }
    }

    /// One instruction; false when it faults.
    fn run(&self, at: u64, len: usize, registers: &[(&str, u64)]) -> anyhow::Result<bool> {
        self.processor.set(&self.isa.before)?;
        self.processor.set(registers)?;
        self.processor.set(&[(self.isa.counter, at)])?;
        self.processor.step()?;
        self.done.set(self.done.get() + 1);
        match self.processor.get(self.isa.counter)? {
            found if found == at + len as u64 => Ok(true),
            found if found == self.isa.handler => Ok(false),
            found => bail!("the instruction at {at:#x} led to {found:#x}"),
        }
    }
}

/// Where the store and the flush lie, behind the load.
const STORE: u64 = 0x10;
const FLUSH: u64 = 0x20;

/// Pages of the check of dirty bits, and how often its steps are done.
const PAGES: u64 = 64;
const ROUNDS: u64 = 6;

/// Leaves of each size that may be written or only be read, and dirty bits, in a table that the processor
/// walks and in which nothing is mapped yet. Yields how many accesses there were.
pub(super) fn all<F: Format, const LOG2: u32>(
    accesses: &Accesses<'_>,
    table: &mut Table<F, &Tables<LOG2>>,
    data: Span<Pa>,
) -> anyhow::Result<u64> {
    let Isa { pages, prot, .. } = accesses.isa;
    table.map(pages.start, &[pages.cast()], prot)?;
    accesses.flush()?;
    let mut random = Rng::with_seed(accesses.processor.round());
    every_leaf_size(accesses, table, data, &mut random)?;
    dirty_bits(accesses, table, data, &mut random)?;
    Ok(accesses.done.get())
}

fn every_leaf_size<F: Format, const LOG2: u32>(
    accesses: &Accesses<'_>,
    table: &mut Table<F, &Tables<LOG2>>,
    data: Span<Pa>,
    random: &mut Rng,
) -> anyhow::Result<()> {
    let machine = accesses.processor.machine();
    for size in table.page_sizes().iter() {
        for span in table.format().aperture().spans() {
            for prot in [Prot::RW, Prot::READ] {
                // Leaves that are larger than memory lead there at least with a part.
                let address = data.start + random.u64(..data.len / 8) * 8;
                let leaf = Span::new(address & !(size - 1), size);
                let start = span.last() - (size - 1);
                let iova = start + (address - leaf.start);
                table.map(start, &[leaf], prot)?;
                let what = format!("{prot} {iova:#x} -> {address:#x}, {size:#x} bytes");
                let (first, second) = (random.u64(..), random.u64(..));
                machine.writeq(address, first)?;
                let found = accesses.load(iova)?;
                ensure!(
                    found == Some(first),
                    "{what}: loads {found:x?}, not {first:#x}"
                );
                let stored = accesses.store(iova, second)?;
                ensure!(
                    stored == prot.contains(Prot::WRITE),
                    "{what}: stored: {stored}"
                );
                let (found, expected) =
                    (machine.readq(address)?, if stored { second } else { first });
                ensure!(found == expected, "{what}: {found:#x}, not {expected:#x}");
                let mut gather = Gather::new();
                table.unmap(Span::new(start, size), &mut gather, &mut iopt::NoRuns)?;
                table.reclaim(gather.flush_with(|_| accesses.flush())?);
                let found = accesses.load(iova)?;
                ensure!(found.is_none(), "{what}: unmapped, and loads {found:x?}");
            }
        }
    }
    Ok(())
}

fn dirty_bits<F: Format, const LOG2: u32>(
    accesses: &Accesses<'_>,
    table: &mut Table<F, &Tables<LOG2>>,
    data: Span<Pa>,
    random: &mut Rng,
) -> anyhow::Result<()> {
    let page = table.page_sizes().smallest();
    let all = Span::new(1 << 34, PAGES * page);
    // Addresses that leave no room for larger leaves.
    table.map(
        all.start,
        &[Span::new(data.start + page, all.len)],
        Prot::RW,
    )?;
    table.track_dirty(true)?;
    let store = |pages: u64| -> anyhow::Result<()> {
        for nth in (0..PAGES).filter(|nth| pages >> nth & 1 == 1) {
            let stored = accesses.store(all.start + nth * page, pages)?;
            ensure!(stored, "page {nth} cannot be written");
        }
        Ok(())
    };
    for round in 0..ROUNDS {
        let written = random.u64(..) & random.u64(..);
        store(written)?;
        // Pages that are only read stay clean.
        for nth in 0..PAGES {
            let found = accesses.load(all.start + nth * page)?;
            ensure!(found.is_some(), "page {nth} cannot be read");
        }
        let mut harvest = |meanwhile: u64| {
            let mut pending = Pending::new([0; 1], all, page)?;
            table.harvest(all, &mut pending)?;
            store(meanwhile)?;
            let shown = pending.flush_with(|_| accesses.flush())?;
            let found = shown.words()[0];
            shown.acknowledge();
            anyhow::Ok(found)
        };
        // Writes between harvest and flush are seen now or with the next harvest.
        let meanwhile = random.u64(..) & random.u64(..) & random.u64(..);
        let (found, next) = (harvest(meanwhile)?, harvest(0)?);
        ensure!(
            found == written && found | next == written | meanwhile && next & !meanwhile == 0,
            "round {round}: {written:#x} and {meanwhile:#x} written, {found:#x} and {next:#x} found"
        );
    }
    Ok(())
}
