//! Many areas, many devices, many threads.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use ioas::{Ioas, Ledger, Memory, Synthetic};
use iommu::{BadTarget, DeviceId, DomainId, SoftwareUnit, TargetMemory};
use iopt::format::VtdSs;
use iopt::{
    AnyTable, FormatId, Gather, HeapTables, Prot, SharedTable, Table, TableMapError, TableOps as _,
};
use runs::{Iova, Pa, PageSizes, Span};

use crate::{anonymous, any};

const PAGE: u64 = 4096;

type Space = Ioas;

fn space(tables: &Arc<HeapTables>) -> anyhow::Result<Space> {
    let sizes = PageSizes::from_bits(u64::MAX);
    let table = AnyTable::new(FormatId::VtdSs, 4, sizes, Arc::clone(tables)).map_err(any)?;
    Ok(Ioas::over_table(DomainId(1), table))
}

/// `count` areas of a page each, with a page between any two: mapped, found and unmapped one by one.
pub(crate) fn areas(count: u64) -> anyhow::Result<String> {
    let leaf_tables = (2 * count).div_ceil(512) + 1;
    let room = leaf_tables + leaf_tables.div_ceil(512) + 8;
    let tables = Arc::new(HeapTables::with_tables(room).map_err(any)?);
    let space = space(&tables)?;
    let ledger = Ledger::unlimited();
    let run = Span::new(1 << 40, count * PAGE);
    let memory = Memory::new(Arc::new(Synthetic::new([run])), &ledger);
    let iova = |n: u64| (1 << 32) + 2 * n * PAGE;
    // Any order but the one of addresses: an odd step goes through all of a power of two.
    let round = count.next_power_of_two();
    let any_order = || {
        (0..round)
            .map(move |n| n * 0x9e37_79b1 % round)
            .filter(move |n| *n < count)
    };
    let before = anonymous()?;
    let begun = Instant::now();
    for n in any_order() {
        space.map(iova(n), &memory, Span::new(n * PAGE, PAGE), Prot::RW)?;
    }
    let map = begun.elapsed();
    let grown = anonymous()?.saturating_sub(before + tables.in_use() * PAGE);
    ensure!(
        space.len() as u64 == count && ledger.in_use() == count * PAGE,
        "areas are missing"
    );
    let begun = Instant::now();
    for n in any_order() {
        let found = space
            .area_at(iova(n) + PAGE - 1)
            .map(|area| area.part().start);
        ensure!(found == Some(n * PAGE), "area {n}: {found:?}");
        ensure!(space.area_at(iova(n) + PAGE).is_none(), "behind area {n}");
    }
    let find = begun.elapsed();
    let begun = Instant::now();
    for n in any_order() {
        let unmapped = space.unmap(Span::new(iova(n), PAGE))?;
        ensure!(unmapped.unpinned == PAGE, "area {n}: {unmapped:?}");
    }
    let unmap = begun.elapsed();
    ensure!(
        space.is_empty() && ledger.in_use() == 0 && tables.in_use() == 1,
        "something is left"
    );
    space.close()?;
    let each = |time: std::time::Duration| time.as_secs_f64() * 1e6 / count as f64;
    Ok(format!(
        "{count} in any order: {} bytes an area without tables; map {:.2} µs, two looks {:.2} µs, unmap {:.2} µs each",
        grown / count,
        each(map),
        each(find),
        each(unmap)
    ))
}

/// Memory in which every word is its own physical address.
struct Echo;

impl TargetMemory for Echo {
    fn with_cells(
        &self,
        span: Span<Pa>,
        visit: &mut dyn FnMut(&[AtomicU64]),
    ) -> Result<(), BadTarget> {
        let words = (0..span.len / 8).map(|n| AtomicU64::new(span.start + 8 * n));
        visit(&words.collect::<Vec<_>>());
        Ok(())
    }
}

/// `count` devices in one address space: attached, each finds what is mapped and faults beside it, detached
/// one by one.
pub(crate) fn devices(count: u64) -> anyhow::Result<String> {
    let tables = Arc::new(HeapTables::with_tables(64).map_err(any)?);
    let unit = SoftwareUnit::new(Arc::clone(&tables), Echo);
    let space = space(&tables)?;
    let (iova, run) = (3 << 30, Span::new(1 << 33, 2 << 20));
    let memory = Memory::new(Arc::new(Synthetic::new([run])), &Ledger::unlimited());
    let device = |n: u64| DeviceId::pci((n >> 3) as u8 + 1, 0, n as u8 & 7);
    let mut ports = Vec::new();
    for n in 0..count {
        space.attach((Arc::new(unit.clone()), device(n)))?;
        ports.push(unit.port(device(n)));
    }
    let again = space.attach((Arc::new(unit.clone()), device(0)));
    ensure!(again.is_err(), "a device is attached twice");
    space.map(iova, &memory, Span::new(0, run.len), Prot::RW)?;
    let mut word = [0];
    let attached = |n: u64, port: &mut iommu::Port<_, _>, word: &mut [u64; 1]| {
        let offset = n * 64;
        let found = port.read(iova + offset, word).is_ok();
        let beside = port.read(iova + run.len + offset, &mut [0]).is_ok();
        (found && word[0] == run.start + offset, beside)
    };
    for (n, port) in ports.iter_mut().enumerate() {
        let found = attached(n as u64, port, &mut word);
        ensure!(found == (true, false), "device {n}: {found:?}");
    }
    for n in 0..count {
        space.detach(device(n))?;
        // It has gone, and the others stay.
        let port = ports.get_mut(n as usize).context("a port")?;
        ensure!(
            port.read(iova, &mut word).is_err(),
            "device {n} is detached"
        );
        if let Some(next) = ports.get_mut(n as usize + 1) {
            let found = attached(n + 1, next, &mut word);
            ensure!(found == (true, false), "device {}: {found:?}", n + 1);
        }
    }
    space.close()?;
    ensure!(tables.in_use() == 0, "tables are left");
    Ok(format!(
        "{count} attached, each finds what is mapped, faults beside it, and is detached alone"
    ))
}

/// `count` threads on one table. Each has pages of its own, in leaf tables that it shares with all others,
/// and all of them want one range besides, which exactly one is given at a time.
pub(crate) fn threads(count: u64, rounds: u64) -> anyhow::Result<String> {
    let tables = Arc::new(HeapTables::with_tables(4096).map_err(any)?);
    let format = VtdSs::new(4).map_err(any)?;
    let table = Table::new(format, Arc::clone(&tables)).map_err(any)?;
    let table: Arc<SharedTable<VtdSs, Arc<HeapTables>>> = Arc::new(SharedTable::new(table));
    let begun = Instant::now();
    let together = Arc::new(Barrier::new(count as usize));
    let given = Arc::new(Mutex::new(()));
    let thread = |number: u64| {
        let (table, together) = (Arc::clone(&table), Arc::clone(&together));
        let given = Arc::clone(&given);
        thread::spawn(move || {
            together.wait();
            play(&table, &given, number, count, rounds)
        })
    };
    let threads: Vec<_> = (0..count).map(thread).collect();
    let (mut had, mut refused) = (0, 0);
    for thread in threads {
        let done = thread.join().map_err(|_| any("a thread has panicked"))?;
        let (its, not) = done?;
        (had, refused) = (had + its, refused + not);
    }
    let time = begun.elapsed();
    let mut settled = 0;
    while !table.poll() && settled < 1000 {
        settled += 1;
        thread::yield_now();
    }
    let table = Arc::into_inner(table)
        .context("a thread still has the table")?
        .into_inner();
    ensure!(table.leaf_sizes().total().bytes == 0, "something is mapped");
    ensure!(tables.in_use() == table.tables(), "tables are lost");
    ensure!(had > 0, "no thread has had the range that all want");
    Ok(format!(
        "{count}, {rounds} rounds each in {:.2} s: own pages always, the range that all want {had} times, refused {refused} times",
        time.as_secs_f64()
    ))
}

fn unmap(table: &SharedTable<VtdSs, Arc<HeapTables>>, range: Span<Iova>) -> anyhow::Result<()> {
    let mut gather = Gather::new();
    table.enter().unmap(range, &mut gather, &mut iopt::NoRuns)?;
    let flushed = gather.flush_with(|_| Ok::<_, std::convert::Infallible>(()))?;
    table.reclaim(flushed);
    Ok(())
}

fn play(
    table: &SharedTable<VtdSs, Arc<HeapTables>>,
    given: &Mutex<()>,
    number: u64,
    count: u64,
    rounds: u64,
) -> anyhow::Result<(u64, u64)> {
    // Over two leaf tables.
    let wanted = Span::new((8 << 30) - 64 * PAGE, 128 * PAGE);
    let (mut had, mut refused) = (0, 0);
    for round in 0..rounds {
        let page = (round * count + number) % (1 << 16);
        let own = Span::new((4 << 30) + page * PAGE, PAGE);
        let frame = (1 << 40) + own.start;
        // Tables come back when every reader that was under way has left: a thread that waits for its
        // processor meanwhile has all others wait.
        while let Err(cause) = table
            .enter()
            .map(own.start, &[Span::new(frame, PAGE)], Prot::RW)
        {
            ensure!(
                matches!(cause, TableMapError::NoTables(_)),
                "thread {number}: {cause}"
            );
            table.poll();
            thread::yield_now();
        }
        ensure!(
            table.enter().translate(own.start) == Some(frame),
            "thread {number}: its page"
        );
        let frame = (number + 2) << 40;
        if let Ok(_given) = given.try_lock() {
            had += 1;
            table
                .enter()
                .map(wanted.start, &[Span::new(frame, wanted.len)], Prot::RW)
                .map_err(any)?;
            // Others are to find it given away.
            thread::yield_now();
            for offset in [0, wanted.len - PAGE] {
                let found = table.enter().translate(wanted.start + offset);
                ensure!(found == Some(frame + offset), "thread {number}: {found:x?}");
            }
            unmap(table, wanted)?;
        } else {
            refused += 1;
        }
        unmap(table, own)?;
    }
    Ok((had, refused))
}
