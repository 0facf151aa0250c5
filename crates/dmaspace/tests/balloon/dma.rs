//! Devices first: devices in software do DMA to memory that goes through a balloon, over and over, in
//! two address spaces, while others do DMA all around it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use dmaspace::balloon::BalloonDma;
use dmaspace::ioas::{Ioas, Memory, WhenUnmapped};
use dmaspace::iommu::DomainId;
use dmaspace::iopt::{AnyTable, FormatId, Prot};
use dmaspace::runs::{GuestAddr, PageSizes, Span};
use dmaspace::virtio_balloon::{KeepReason, Releaser};
use fastrand::Rng;

use crate::host::{DEVICE, GUEST, Machine, PAGE, PAGES, SECOND, pages, seen};

/// Size of a group of pages whose last one never goes into the balloon.
const EVERY: u64 = 16;

/// Runs in order that leave the last of each sixteen pages alone.
fn runs(numbers: &mut Rng) -> Vec<Span<GuestAddr>> {
    let mut groups: Vec<u64> = (0..=numbers.u64(..3))
        .map(|_| numbers.u64(..PAGES / EVERY))
        .collect();
    groups.sort_unstable();
    groups.dedup();
    let run = |group| {
        let first = numbers.u64(..EVERY - 1);
        pages(group * EVERY + first, 1 + numbers.u64(..EVERY - 1 - first))
    };
    groups.into_iter().map(run).collect()
}

/// Disagreement between a device and the guest.
#[derive(Debug)]
struct Stale {
    _round: u64,
}

/// Pages go through the balloon `rounds` times, and devices use them right after. `first` says whether
/// devices let go before memory is discarded.
fn rounds(machine: &mut Machine, rounds: u64, first: bool) -> Result<u64, Stale> {
    let stop = AtomicBool::new(false);
    let around = AtomicU64::new(0);
    let [one, two] = machine.ports();
    thread::scope(|scope| {
        // Devices of both address spaces, in the pages that never go: each has its own half of these.
        for (n, mut port) in [one, two].into_iter().enumerate() {
            let (stop, around) = (&stop, &around);
            scope.spawn(move || {
                let mut numbers = Rng::with_seed(n as u64);
                while !stop.load(Ordering::Relaxed) {
                    let group = 2 * numbers.u64(..PAGES / EVERY / 2) + n as u64;
                    let guest = GUEST + (group * EVERY + EVERY - 1) * PAGE + 8 * numbers.u64(..512);
                    let value = numbers.u64(..u64::MAX) + 1;
                    port.write(seen(n, guest), &[value]).unwrap();
                    let mut word = [0];
                    port.read(seen(n, guest), &mut word).unwrap();
                    assert_eq!(word, [value], "{guest:#x}");
                    // Not to keep the processors from whom all is about.
                    if around.fetch_add(1, Ordering::Relaxed) % 16 == 0 {
                        thread::sleep(Duration::from_micros(50));
                    }
                }
            });
        }
        let mut ports = machine.ports();
        let mut numbers = Rng::with_seed(2);
        let mut checked = 0;
        let mut result = Ok(());
        for round in 0..rounds {
            let runs = runs(&mut numbers);
            // The devices have used it before: units know where it was.
            for run in &runs {
                for (n, port) in ports.iter_mut().enumerate() {
                    port.write(seen(n, run.start), &[round]).unwrap();
                }
            }
            if first {
                assert_eq!(machine.release(&runs), []);
                for (n, port) in ports.iter_mut().enumerate() {
                    assert!(port.read(seen(n, runs[0].start), &mut [0]).is_err());
                }
            }
            machine.discard(&runs);
            if first {
                // The charge for the memory is kept.
                assert!(machine.ledger.charge(1).is_err());
                assert_eq!(machine.restore(&runs), []);
            }
            for run in &runs {
                for guest in [run.start, run.last() - 7] {
                    for (n, port) in ports.iter_mut().enumerate() {
                        let value = (round + 1) << 8 | n as u64;
                        machine.host.word(guest).store(value, Ordering::Relaxed);
                        let mut word = [0];
                        port.read(seen(n, guest), &mut word).unwrap();
                        let to_device = word == [value];
                        port.write(seen(n, guest), &[!value]).unwrap();
                        let back = machine.host.word(guest).load(Ordering::Relaxed);
                        if !to_device || back != !value {
                            result = Err(Stale { _round: round });
                        }
                        checked += 2;
                    }
                }
            }
            if result.is_err() {
                break;
            }
            if round % 256 == 0 {
                let before = around.load(Ordering::Relaxed);
                while around.load(Ordering::Relaxed) < before + 16 {
                    thread::yield_now();
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
        result.map(|()| checked)
    })
}

#[test]
fn pages_that_come_back_are_seen_by_devices_at_once() {
    let mut machine = Machine::new();
    let checked = rounds(&mut machine, 1_000, true).unwrap();
    assert!(checked >= 8_000, "{checked}");
    machine.end();
}

#[test]
fn without_devices_first_the_checker_sees_stale_memory() {
    let mut machine = Machine::new();
    assert!(rounds(&mut machine, 1_000, false).is_err());
    machine.end();
}

#[test]
fn what_another_owner_pins_is_kept_in_all_address_spaces() {
    let mut machine = Machine::new();
    let held = machine.spaces[1].pin(
        Span::new(SECOND + 20 * PAGE, 2 * PAGE),
        Prot::READ,
        WhenUnmapped::Keeps,
    );
    // In runs that begin before, go over it, and lie elsewhere.
    let runs = [pages(0, 4), pages(18, 10), pages(500, 524)];
    let told = machine.release(&runs);
    assert_eq!(told, [(runs[1], KeepReason::PinnedElsewhere)]);
    let [mut one, mut two] = machine.ports();
    let mut word = [0];
    for (run, there) in runs.iter().zip([false, true, false]) {
        assert_eq!(one.read(run.start, &mut word).is_ok(), there, "{run}");
        assert_eq!(
            two.read(seen(1, run.start), &mut word).is_ok(),
            there,
            "{run}"
        );
    }
    drop(held);
    // A third address space, of which the balloon does not know.
    let sizes = PageSizes::from_bits(u64::MAX);
    let table = AnyTable::new(FormatId::VtdSs, 4, sizes, machine.tables.clone()).unwrap();
    let third = Ioas::over_table(DomainId(1), table);
    let part = Span::new(100 * PAGE, 2 * PAGE);
    third.map(0, &machine.memory, part, Prot::RW).unwrap();
    let told = machine.release(&[pages(90, 20)]);
    assert_eq!(told, [(pages(100, 2), KeepReason::PinnedElsewhere)]);
    assert!(one.read(GUEST + 100 * PAGE, &mut word).is_ok());
    assert!(one.read(GUEST + 99 * PAGE, &mut word).is_err());
    third.close().unwrap();
    assert_eq!(machine.restore(&[pages(0, PAGES)]), []);
    machine.end();
}

#[test]
fn a_pin_that_fails_is_reported_and_tried_again() {
    let mut machine = Machine::new();
    let runs = [pages(3, 5), pages(40, 8)];
    assert_eq!(machine.release(&runs), []);
    machine.discard(&runs);
    machine.host.refuses.store(true, Ordering::Relaxed);
    assert_eq!(machine.restore(&runs), [(runs[0], KeepReason::Kernel(14))]);
    let [mut one, mut two] = machine.ports();
    let mut word = [0];
    // The first address space has asked first.
    assert!(one.read(runs[0].start, &mut word).is_err());
    assert!(two.read(seen(1, runs[0].start), &mut word).is_ok());
    assert!(one.read(runs[1].start, &mut word).is_ok());
    assert_eq!(machine.restore(&runs), []);
    assert!(one.read(runs[0].start, &mut word).is_ok());
    machine.end();
}

#[test]
fn what_is_no_memory_of_devices_is_left_alone() {
    let mut machine = Machine::new();
    let beyond = Span::new(GUEST + PAGES * PAGE, 1 << 20);
    assert_eq!(machine.release(&[Span::new(0, PAGE), beyond]), []);
    assert_eq!(machine.restore(&[Span::new(0, PAGE), beyond]), []);
    assert!(!Releaser::<Arc<Memory>>::attached(&BalloonDma::new()));
    // A part of the guest's memory that only one device sees, at two addresses.
    let part = pages(8, 8);
    let first = &machine.spaces[0];
    first.unmap(pages(0, PAGES).cast()).unwrap();
    let half = Span::new(0, PAGES * PAGE / 2);
    for at in [GUEST, GUEST << 1] {
        first.map(at, &machine.memory, half, Prot::RW).unwrap();
    }
    assert_eq!(machine.release(&[part]), []);
    assert_eq!(
        machine.memory.first_held(Span::new(8 * PAGE, 8 * PAGE)),
        None
    );
    let mut one = machine.units[0].port(DEVICE);
    for at in [GUEST, GUEST << 1] {
        assert!(one.read(at + 7 * PAGE, &mut [0]).is_ok());
        assert!(one.read(at + 8 * PAGE, &mut [0]).is_err());
    }
    assert_eq!(machine.restore(&[part]), []);
    let first = &machine.spaces[0];
    first.unmap(Span::new(GUEST << 1, half.len)).unwrap();
    machine.end();
}
