//! VT-d with the driver `iommu::vtd`, in each of its modes.

use anyhow::{Context as _, ensure};
use conformance::random::Random;
use ioas::HostTables;
use iommu::{
    DeviceId, DomainId, Fault, FaultReason, Unit as _,
    vtd::{Config, Mode, Vtd},
};
use iopt::{
    Discard, Format, Gather, Pending, Prot, Table,
    format::{VtdSs, X86_64},
    walk::Access,
};
use runs::Span;

use super::expect;
use crate::{At, DATA, DEVICES, LONGEST, Registers, Rig, Seen, Unit};

/// Where the q35 has the registers.
const BASE: u64 = 0xfed9_0000;

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A unit that translates, and the driver that has made it do so.
struct Driven<'a> {
    rig: &'a Rig,
    vtd: Vtd<Registers<'a>, &'a HostTables>,
}

impl<'a> Driven<'a> {
    fn new(rig: &'a Rig) -> anyhow::Result<Self> {
        let mode = match rig.unit() {
            Unit::VtdLegacy => Mode::Legacy,
            Unit::VtdSecond => Mode::ScalableSecond,
            Unit::VtdFirst => Mode::ScalableFirst,
        };
        let config = Config {
            mode,
            ..Config::default()
        };
        let vtd = Vtd::new(rig.registers(BASE), rig.tables(), config)?;
        vtd.enable()?;
        Ok(Self { rig, vtd })
    }

    /// A table is told to be the one of a device.
    fn attach<F: Format>(
        &self,
        device: usize,
        domain: u32,
        table: &Table<F, &'a HostTables>,
    ) -> anyhow::Result<()> {
        let domain = DomainId(domain);
        Ok(self.vtd.attach(id(device), domain, table.root())?)
    }

    fn copy(&self, device: usize, from: At, to: At, expected: Seen) -> anyhow::Result<()> {
        let seen = self.rig.copy(device, from, to, LONGEST)?;
        let what = format!("device {device}, {from:x?} to {to:x?}");
        expect(seen, expected, &what)
    }

    /// The fault that is recorded.
    fn fault(&self) -> anyhow::Result<Fault> {
        let mut faults = Vec::new();
        self.vtd.drain_faults(&mut |fault| faults.push(fault));
        ensure!(faults.len() < 2, "QEMU has one record: {faults:?}");
        faults.pop().context("no fault")
    }

    /// The unit translates no more; nothing is left over.
    fn end(self) -> anyhow::Result<()> {
        let mut faults = Vec::new();
        let lost = self.vtd.drain_faults(&mut |fault| faults.push(fault));
        ensure!(faults.is_empty() && lost == 0, "{lost} lost, {faults:?}");
        let (registers, _) = self.vtd.tear_down()?;
        registers.finish()
    }
}

fn id(device: usize) -> DeviceId {
    DeviceId(DEVICES[device].requester_id().into())
}

/// Runs a body with each table that the unit walks.
macro_rules! with_tables {
    ($rig:ident, $body:ident) => {
        match $rig.unit() {
            Unit::VtdFirst => $body($rig, X86_64::new(4)?),
            Unit::VtdLegacy | Unit::VtdSecond => {
                $body($rig, VtdSs::new(3)?)?;
                $body($rig, VtdSs::new(4)?)
            }
        }
    };
}

pub(super) fn every_leaf_size(rig: &Rig) -> anyhow::Result<()> {
    fn body<F: Format>(rig: &Rig, format: F) -> anyhow::Result<()> {
        let driven = Driven::new(rig)?;
        let mut table = Table::new(format, rig.tables())?;
        let aperture = format.aperture();
        // The upper half of a sign-extended address space is for another check.
        let half = u32::from(rig.unit() == Unit::VtdFirst);
        let top = 1_u64 << (aperture.bits - half);
        let mut places = Vec::new();
        for (nth, size) in [PAGE, 2 * MIB, GIB].into_iter().enumerate() {
            let nth = nth as u64;
            let address = 8 * GIB + nth * 4 * GIB + size;
            for (iova, address) in [
                (nth * GIB, address),
                (top - (nth * GIB + size), address + 2 * GIB),
            ] {
                table.map(iova, &[Span::new(address, size)], Prot::RW)?;
                let last = size - PAGE;
                for offset in [0, last] {
                    let (iova, address) = (iova + offset, address + offset);
                    places.push(At { iova, address });
                }
            }
        }
        driven.attach(0, 5, &table)?;
        for (nth, from) in places.iter().enumerate() {
            let to = places[(nth + 5) % places.len()];
            driven.copy(0, *from, to, Seen::Copied)?;
        }
        driven.vtd.detach(id(0))?;
        driven.end()
    }
    with_tables!(rig, body)
}

pub(super) fn two_domains(rig: &Rig) -> anyhow::Result<()> {
    fn body<F: Format>(rig: &Rig, format: F) -> anyhow::Result<()> {
        let driven = Driven::new(rig)?;
        // The same addresses lead each of them elsewhere.
        let memory = [DATA.start, DATA.start + MIB];
        for (device, address) in memory.into_iter().enumerate() {
            let mut table = Table::new(format, rig.tables())?;
            table.map(0, &[Span::new(address, 2 * PAGE)], Prot::RW)?;
            driven.attach(device, device as u32 + 1, &table)?;
        }
        let at = |device: usize, iova| At {
            iova,
            address: memory[device] + iova,
        };
        for device in [0, 1, 0, 1] {
            driven.copy(device, at(device, 0), at(device, PAGE), Seen::Copied)?;
            let other = at(1 - device, PAGE);
            driven.copy(device, at(device, 0), other, Seen::Untouched)?;
        }
        // One goes, the other stays.
        driven.vtd.detach(id(0))?;
        driven.copy(0, at(0, 0), at(0, PAGE), Seen::Untouched)?;
        ensure!(driven.fault()?.device == id(0));
        driven.copy(1, at(1, 0), at(1, PAGE), Seen::Copied)?;
        driven.vtd.detach(id(1))?;
        driven.end()
    }
    with_tables!(rig, body)
}

pub(super) fn faults(rig: &Rig) -> anyhow::Result<()> {
    fn body<F: Format>(rig: &Rig, format: F) -> anyhow::Result<()> {
        let driven = Driven::new(rig)?;
        let mut table = Table::new(format, rig.tables())?;
        let (good, read_only, hole) = (0x10_0000, 0x20_0000, 0x7654_3000);
        for (iova, prot) in [(good, Prot::RW), (read_only, Prot::READ)] {
            table.map(iova, &[Span::new(DATA.start + iova, PAGE)], prot)?;
        }
        driven.attach(0, 1, &table)?;
        let at = |iova| At {
            iova,
            address: DATA.start + iova,
        };
        for (device, from, to, seen, iova, access) in [
            (0, good, hole, Seen::Untouched, hole, Access::Write),
            (0, hole, good, Seen::Otherwise, hole, Access::Read),
            (
                0,
                good,
                read_only,
                Seen::Untouched,
                read_only,
                Access::Write,
            ),
            (1, good, good + 0x800, Seen::Untouched, good, Access::Read),
        ] {
            let copied = rig.copy(device, at(from), at(to), 64)?;
            let what = format!("device {device}, {from:#x} to {to:#x}");
            expect(copied, seen, &what)?;
            let fault = driven.fault().context(what)?;
            ensure!(
                (fault.device, fault.iova, fault.access) == (id(device), iova, access)
                    && matches!(fault.reason, FaultReason::Reported { .. }),
                "device {device}, {access} of {iova:#x}: {fault}"
            );
        }
        driven.copy(0, at(read_only), at(good), Seen::Copied)?;
        driven.vtd.detach(id(0))?;
        driven.end()
    }
    with_tables!(rig, body)
}

pub(super) fn stale(rig: &Rig) -> anyhow::Result<()> {
    fn body<F: Format>(rig: &Rig, format: F) -> anyhow::Result<()> {
        let driven = Driven::new(rig)?;
        let mut table = Table::new(format, rig.tables())?;
        let domain = DomainId(3);
        driven.attach(0, domain.0, &table)?;
        for (iova, size) in [(0x1000, PAGE), (4 * MIB, 2 * MIB)] {
            let source = At {
                iova: GIB,
                address: DATA.start,
            };
            let target = At {
                iova,
                address: DATA.start + GIB - DATA.start % GIB,
            };
            let copy = |seen| driven.copy(0, source, target, seen);
            table.map(source.iova, &[Span::new(source.address, PAGE)], Prot::RW)?;
            table.map(iova, &[Span::new(target.address, size)], Prot::RW)?;
            copy(Seen::Copied)?;
            let mut gather = Gather::new();
            let both = [Span::new(iova, size), Span::new(source.iova, PAGE)];
            table.unmap(both[0], &mut gather, &mut Discard)?;
            copy(Seen::Copied).context("unmapped, not yet invalidated")?;
            let before = driven.vtd.counters();
            let flushed = gather.flush_with(|what| driven.vtd.invalidate(domain, what))?;
            let waits = driven.vtd.counters().waits - before.waits;
            ensure!(waits == 1, "{waits} waits in one gather");
            table.reclaim(flushed);
            copy(Seen::Untouched).context("invalidated")?;
            ensure!(driven.fault()?.iova == iova);
            table.unmap(both[1], &mut gather, &mut Discard)?;
            let flushed = gather.flush_with(|what| driven.vtd.invalidate(domain, what))?;
            table.reclaim(flushed);
        }
        driven.vtd.detach(id(0))?;
        driven.end()
    }
    with_tables!(rig, body)
}

/// Pages of the check of dirty bits, and how often each of its steps is done.
const PAGES: u64 = 64;
const ROUNDS: u64 = 8;

/// First-stage tables only: QEMU sets no bits in others. It sets D only together with A (seen in 10.0),
/// not in a leaf that has A already, against section 3.6.2 "Accessed, Extended Accessed, and Dirty
/// Flags". So each page gets dirty once.
pub(super) fn dirty(rig: &Rig) -> anyhow::Result<()> {
    let driven = Driven::new(rig)?;
    let mut table = Table::new(X86_64::new(4)?, rig.tables())?;
    let all = Span::new(0, PAGES * PAGE);
    table.map(0, &[Span::new(DATA.start, all.len)], Prot::RW)?;
    table.track_dirty(true)?;
    let domain = DomainId(2);
    driven.attach(0, domain.0, &table)?;
    let mut random = Random::new(8);
    let mut pages = (0..PAGES - 1).map(|nth| 1 + nth * 37 % (PAGES - 1));
    // Reads the first page, writes one a second time and some others.
    let mut write_some = |again: Option<u64>| -> anyhow::Result<u64> {
        let mut written = 0;
        let count = 1 + random.below(3) as usize;
        for page in again.into_iter().chain(pages.by_ref().take(count)) {
            let at = |iova| At {
                iova,
                address: DATA.start + iova,
            };
            driven.copy(0, at(0), at(page * PAGE), Seen::Copied)?;
            written |= 1 << page;
        }
        Ok(written)
    };
    let mut harvest = |between: &mut dyn FnMut() -> anyhow::Result<u64>| {
        let mut pending = Pending::new([0; 1], all, PAGE)?;
        table.harvest(all, &mut pending)?;
        let meanwhile = between()?;
        let shown = pending.flush_with(|what| driven.vtd.invalidate(domain, what))?;
        let found = shown.words()[0];
        shown.acknowledge();
        anyhow::Ok((found, meanwhile))
    };
    for round in 0..ROUNDS {
        let written: u64 = write_some(None)?;
        let again = u64::from(written.trailing_zeros());
        let (found, meanwhile) = harvest(&mut || write_some(Some(again)))?;
        // What is written between harvest and flush is seen now or with the next harvest.
        let (next, _) = harvest(&mut || Ok(0))?;
        let (all, shown) = (written | meanwhile, found | next);
        ensure!(
            found & !all == 0 && written & !found == 0 && all == shown,
            "round {round}: {written:#x} and {meanwhile:#x} written, {found:#x} and {next:#x} found"
        );
    }
    driven.vtd.detach(id(0))?;
    driven.end()
}

/// Steps of the mixture.
const STEPS: u64 = 60;
/// Its areas lie at multiples of this.
const SLOT: u64 = 8 * MIB;
const SLOTS: u64 = 16;

/// A run that is mapped.
#[derive(Clone, Copy, Debug)]
struct Area {
    iova: u64,
    pa: u64,
    len: u64,
}

impl Area {
    /// One of its pages.
    fn page(self, random: &mut Random) -> At {
        let offset = random.below(self.len / PAGE) * PAGE;
        At {
            iova: self.iova + offset,
            address: self.pa + offset,
        }
    }
}

/// A place for an area.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    area: Option<Area>,
    /// What was reached last, and may be remembered by the unit when it should not.
    touched: Option<At>,
}

/// An area for a slot. In half of the cases both addresses are equal modulo 2 MiB, so that there are
/// large leaves in it.
fn nth_area(nth: u64, random: &mut Random) -> Area {
    let len = (1 + random.below(SLOT / PAGE / 2)) * PAGE;
    let offset = random.below(SLOT / PAGE / 2) * PAGE;
    let shift = random.below(2) * random.below(512) * PAGE;
    Area {
        iova: nth * SLOT + offset,
        pa: DATA.start + nth * 64 * MIB + offset + shift,
        len,
    }
}

pub(super) fn mixture(rig: &Rig) -> anyhow::Result<()> {
    fn body<F: Format>(rig: &Rig, format: F) -> anyhow::Result<()> {
        let driven = Driven::new(rig)?;
        let mut table = Table::new(format, rig.tables())?;
        let domain = DomainId(9);
        driven.attach(0, domain.0, &table)?;
        let mut random = Random::new(6);
        // One is always there, to copy from.
        let mut slots = vec![Slot::default(); SLOTS as usize];
        for step in 0..STEPS {
            let nth = step.min(1) * (1 + random.below(SLOTS - 1));
            let slot = &mut slots[nth as usize];
            if let Some(area) = slot.area.take() {
                let mut gather = Gather::new();
                let span = Span::new(area.iova, area.len);
                table.unmap(span, &mut gather, &mut Discard)?;
                let flushed = gather.flush_with(|what| driven.vtd.invalidate(domain, what))?;
                table.reclaim(flushed);
            } else {
                let area = nth_area(nth, &mut random);
                let memory = Span::new(area.pa, area.len);
                table.map(area.iova, &[memory], Prot::RW)?;
                slot.area = Some(area);
            }
            let from = slots[0].area.context("the first slot is empty")?;
            for nth in [nth, 1 + step % (SLOTS - 1)] {
                let slot = &mut slots[nth as usize];
                let from = from.page(&mut random);
                let what = || format!("step {step}, slot {nth}");
                if let Some(area) = slot.area.filter(|_| nth > 0) {
                    let to = area.page(&mut random);
                    driven.copy(0, from, to, Seen::Copied).with_context(what)?;
                    slot.touched = Some(to);
                } else if let Some(to) = slot.touched {
                    let seen = Seen::Untouched;
                    driven.copy(0, from, to, seen).with_context(what)?;
                    ensure!(driven.fault()?.iova == to.iova, what());
                }
            }
        }
        driven.vtd.detach(id(0))?;
        driven.end()
    }
    with_tables!(rig, body)
}
