//! VT-d: records of one line and of two, overflow, and dumps.

use super::super::{events, fault, faults};
use super::expect;
use crate::log::{Absent, Class, DumpTable, FaultAccess, LogEvent};

#[test]
fn vtd_reasons_are_decimal_without_0x() {
    use Class::{BadTable, DeviceEntry, InterruptRequest, NoAccess, NotMapped};
    use FaultAccess::{Execute, Read, Unknown, Write};
    let f = expect;
    f(
        "DMAR: [DMA Write] Request device [00:12.0] fault addr 0 [fault reason 05] PTE Write access is not set",
        "0000:00:12.0",
        NoAccess,
        Write,
        Some(0),
    );
    f(
        "dmar: DMAR:[DMA Read] Request device [00:1f.2] fault addr fff9a000 \nDMAR:[fault reason 06] PTE Read access is not set",
        "0000:00:1f.2",
        NoAccess,
        Read,
        Some(0xfff9_a000),
    );
    f(
        "DMAR: [DMA Read NO_PASID] Request device [0x00:0x02.0] fault addr 0x70ad5000 [fault reason 0x07] Next page table ptr is invalid",
        "0000:00:02.0",
        BadTable,
        Read,
        Some(0x70ad_5000),
    );
    f(
        "DMAR: [DMA Read] Request device [00:02.0] PASID ffffffff fault addr 70a28000 [fault reason 12] non-zero reserved fields in PTE",
        "0000:00:02.0",
        BadTable,
        Read,
        Some(0x70a2_8000),
    );
    f(
        "DMAR: [DMA Read NO_PASID] Request device [03:00.0] fault addr 0x100000 [fault reason 0x71] SM: Present bit in first-level paging entry is clear",
        "0000:03:00.0",
        NotMapped,
        Read,
        Some(0x10_0000),
    );
    f(
        "DMAR: [DMA Read] Request device [03:00.0] PASID 2a fault addr 100000 [fault reason 113] SM: Present bit in first-level paging entry is clear",
        "0000:03:00.0",
        NotMapped,
        Read,
        Some(0x10_0000),
    );
    let pasid = f(
        "DMAR: [DMA Read PASID 0x2a] Request device [0001:03:00.0] fault addr 0x100000 [fault reason 0x82] SM: No execute permission",
        "0001:03:00.0",
        Class::Permission,
        Execute,
        Some(0x10_0000),
    );
    assert_eq!((pasid.pasid, pasid.code), (Some(0x2a), Some(0x82)));
    let index = f(
        "DMAR: [INTR-REMAP] Request device [f0:1f.0] fault index 0x25 [fault reason 0x25] Blocked a compatibility format interrupt request",
        "0000:f0:1f.0",
        InterruptRequest,
        Unknown,
        None,
    );
    assert_eq!(index.field("index"), Some(0x25));
    let old = f(
        "DMAR: INTR-REMAP: Request device [[f0:1f.0] fault index 1c\n               INTR-REMAP:[fault reason 37] Blocked a compatibility format interrupt request",
        "0000:f0:1f.0",
        InterruptRequest,
        Unknown,
        None,
    );
    assert_eq!((old.code, old.field("index")), (Some(0x25), Some(0x1c)));
    f(
        "DMAR: [DMA Write] Request device [00:02.0] PASID ffffffff fault addr 0 [fault reason 02] Present bit in context entry is clear",
        "0000:00:02.0",
        DeviceEntry,
        Write,
        Some(0),
    );
    // Escaped by /dev/kmsg, on one line.
    f(
        "3,1,2,-;DMAR:[DMA Write] Request device [00:12.0] fault addr fff9a000 \\x0aDMAR:[fault reason 05] PTE Write access is not set",
        "0000:00:12.0",
        NoAccess,
        Write,
        Some(0xfff9_a000),
    );
    // Wrapped in a mail.
    f(
        "> DMAR: [DMA Write] Request device [00:12.0]\n> fault addr 1000 [fault reason 05] PTE Write access is not set",
        "0000:00:12.0",
        NoAccess,
        Write,
        Some(0x1000),
    );
}

#[test]
fn a_vtd_fault_on_two_lines_is_one_also_with_others_between() {
    let log = "\
        [1.0] DMAR:[DMA Read] Request device [00:1f.2] fault addr fff9a000 \n\
        [1.0] usb 1-1: new device\n\
        [1.0] DMAR:[fault reason 06] PTE Read access is not set\n\
        [2.0] DMAR:[DMA Write] Request device [00:1f.3] fault addr 1000 \n\
        [2.0] DMAR:[DMA Write] Request device [00:1f.4] fault addr 1000 \n\
        [2.0] DMAR:[fault reason 05] PTE Write access is not set\n";
    let faults = faults(log);
    let lines: Vec<_> = faults
        .iter()
        .map(|fault| (fault.code, &fault.lines[..]))
        .collect();
    assert_eq!(
        lines,
        [(Some(6), &[1, 3][..]), (None, &[4]), (Some(5), &[5, 6])]
    );
}

#[test]
fn vtd_overflow_suppression_and_errors() {
    let events = events(
        "DMAR: DRHD: handling fault status reg 3\nDMAR: DRHD: handling fault status reg 2\n[1.0] dmar_fault: 2474 callbacks suppressed",
    );
    let [LogEvent::Overflow(_), LogEvent::Suppressed(suppressed)] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(
        (suppressed.faults, suppressed.exact, suppressed.callbacks),
        (824, false, 2474)
    );
    let error = "DMAR: VT-d detected Invalidation Time-out Error: SID 100\n\
        DMAR: QI HEAD: Device-TLB Invalidation qw0 = 0x3, qw1 = 0x7ffffffffffff001\n\
        DMAR: QI PRIOR: Invalidation Wait qw0 = 0x200000025, qw1 = 0x1000\n\
        DMAR: Invalidation Time-out Error (ITE) cleared";
    let error = expect(
        error,
        "0000:01:00.0",
        Class::UnitError,
        FaultAccess::Unknown,
        None,
    );
    assert_eq!(
        (error.name, error.field("prior qw1")),
        ("ITE", Some(0x1000))
    );
    let error = fault("DMAR: VT-d detected Invalidation Time-out Error: SID 0");
    assert_eq!((error.pci, error.class), (None, Class::UnitError));
}

#[test]
fn vtd_dumps_are_walks() {
    let log = "DMAR: Dump dmar0 table entries for IOVA 0x1000\n\
        DMAR: scalable mode root entry: hi 0x0000000000000000, low 0x0000000100a8b001\n\
        DMAR: context entry: hi 0x0000000000000000, low 0x0000000100a8c401\n\
        DMAR: pasid dir entry: 0x0000000100a8d001\n\
        DMAR: pasid table entry[0]: 0x0000000100a8e0c9\n\
        DMAR: pte level: 4, pte value: 0x0000000000000000\n\
        DMAR: PTE not present at level 3";
    let events = events(log);
    let [LogEvent::Dump(dump)] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!((dump.iova, dump.unit.as_deref()), (0x1000, Some("dmar0")));
    assert_eq!(
        (dump.entries.len(), dump.absent),
        (5, Some(Absent::Level(3)))
    );
    assert_eq!(dump.entries[0].table, DumpTable::ScalableRoot);
    assert_eq!(dump.entries[1].words, [0x0000_0001_00a8_c401, 0]);
    assert_eq!(dump.lines.len(), 7);
}
