//! Spellings of kernels since 2.6, and facts by unit.

use super::{events, fault, faults};
use crate::log::{
    Absent, Certainty, Class, DumpTable, Family, FaultAccess, FaultRecord, LogEvent, Stage,
};

fn facts(record: &FaultRecord) -> (String, Class, Certainty, FaultAccess, Option<u64>) {
    (
        record.device().unwrap_or_default(),
        record.class,
        record.certainty,
        record.access,
        record.address.map(|address| address.value),
    )
}

#[track_caller]
fn expect(
    log: &str,
    device: &str,
    class: Class,
    access: FaultAccess,
    address: Option<u64>,
) -> FaultRecord {
    let record = fault(log);
    let expected = (
        device.to_owned(),
        class,
        Certainty::Certain,
        access,
        address,
    );
    assert_eq!(facts(&record), expected, "{log}");
    assert_eq!(record.lines.len(), log.lines().count(), "{log}");
    record
}

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

#[test]
fn amd_flags_decide() {
    use Class::{BadTable, DeviceEntry, InterruptRequest, NotMapped, Permission, Rmp, UnitError};
    use FaultAccess::{Read, Unknown, Write};
    let f = expect;
    let fault = f(
        "nvme 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x000e address=0xcff49550 flags=0x0070]",
        "0000:01:00.0",
        Permission,
        Write,
        Some(0xcff4_9550),
    );
    assert_eq!(
        (fault.flags, fault.domain),
        (vec!["PR", "RW", "PE"], Some(0xe))
    );
    f(
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=02:00.0 domain=0x0003 address=0x0000000000001000 flags=0x0050]",
        "0000:02:00.0",
        Permission,
        Read,
        Some(0x1000),
    );
    f(
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=02:00.0 domain=0x0003 address=0x1000 flags=0x0020]",
        "0000:02:00.0",
        NotMapped,
        Unknown,
        Some(0x1000),
    );
    f(
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=02:00.0 domain=0x0003 address=0x1000 flags=0x00b0]",
        "0000:02:00.0",
        BadTable,
        Write,
        Some(0x1000),
    );
    f(
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=02:00.0 domain=0x0003 address=0xfee00000 flags=0x0008]",
        "0000:02:00.0",
        InterruptRequest,
        Unknown,
        Some(0xfee0_0000),
    );
    f(
        "AMD-Vi: Event logged [\nIO_PAGE_FAULT device=02:00.0 domain=0x0003 address=0x1000 flags=0x0000]",
        "0000:02:00.0",
        NotMapped,
        Unknown,
        Some(0x1000),
    );
    f(
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=0a:00.0 domain=0x001d\naddress=0x000000000637c000 flags=0x0000]",
        "0000:0a:00.0",
        NotMapped,
        Unknown,
        Some(0x637_c000),
    );
    let pasid = super::fault(
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=0000:02:00.0 domain=0x0003 address=0x1000 flags=0x0001]",
    );
    assert_eq!((pasid.pasid, pasid.domain), (Some(3), None));
    let unknown = super::fault(
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=02:00.0 domain=0x0003 address=0x1000 flags=0x0010]",
    );
    assert_eq!(
        (unknown.class, unknown.certainty),
        (Class::Unknown, Certainty::Unknown)
    );
    let request = f(
        "iommu ivhd0: AMD-Vi: Event logged [INVALID_DEVICE_REQUEST device=0000:00:00.0 pasid=0x00000 address=0xfffffffdf8000000 flags=0x0a00]",
        "0000:00:00.0",
        InterruptRequest,
        Unknown,
        Some(0xffff_fffd_f800_0000),
    );
    assert_eq!(
        (request.unit.as_deref(), request.field("type")),
        (Some("ivhd0"), Some(5))
    );
    f(
        "AMD-Vi: Event logged [ILLEGAL_DEV_TABLE_ENTRY device=03:00.0 pasid=0x00000 address=0xfffffffdf8000000 flags=0x0a00]\nAMD-Vi: DTE[0]: 6190000000000003\nAMD-Vi: DTE[1]: 0\nAMD-Vi: DTE[2]: 0\nAMD-Vi: DTE[3]: 0",
        "0000:03:00.0",
        DeviceEntry,
        Unknown,
        Some(0xffff_fffd_f800_0000),
    );
    f(
        "vfio-pci 0000:c1:00.0: AMD-Vi: Event logged [RMP_PAGE_FAULT vmg_tag=0x0000, gpa=0x740b8784, flags_rmp=0x0000, flags=0x0020]",
        "0000:c1:00.0",
        Rmp,
        Unknown,
        Some(0x740b_8784),
    );
    f(
        "AMD-Vi: Event logged [IOTLB_INV_TIMEOUT device=03:00.0 address=0x100d6d9f0]",
        "0000:03:00.0",
        UnitError,
        Unknown,
        Some(0x1_00d6_d9f0),
    );
    let wait = f(
        "AMD-Vi: IOMMU 0000:00:00.2: Completion-Wait loop timed out",
        "",
        UnitError,
        Unknown,
        None,
    );
    assert_eq!(wait.unit.as_deref(), Some("0000:00:00.2"));
    f(
        "AMD-Vi: Completion-Wait loop timed out",
        "",
        UnitError,
        Unknown,
        None,
    );
    let raw = super::fault(
        "AMD-Vi: Event logged [UNKNOWN event[0]=0x00000300 event[1]=0x20700001 event[2]=0x1000 event[3]=0x0",
    );
    assert_eq!(raw.class, Permission);
}

#[test]
fn smmuv3_words_and_decoded_lines_are_one_fault() {
    use Class::{DeviceEntry, NotMapped, Permission};
    use FaultAccess::{Execute, Read, Unknown, Write};
    let head = "arm-smmu-v3 70c00000.iommu: ";
    let words = |words: [&str; 5]| {
        let lines = words.map(|word| format!("{head}{word}\n"));
        lines.concat()
    };
    let log = words([
        "event 0x10 received:",
        "\t0x0000000400000010",
        "\t0x0000020800000000",
        "\t0x00000000c0a00000",
        "\t0x0000000000000000",
    ]);
    let fault = expect(&log, "0x4", NotMapped, Read, Some(0xc0a0_0000));
    assert_eq!(
        (fault.stage, fault.unit.as_deref(), fault.name),
        (Some(Stage::One), Some("70c00000.iommu"), "F_TRANSLATION")
    );
    assert_eq!(fault.flags, ["CLASS=IN", "RnW"]);
    let log = words([
        "event 0x13 received:",
        "\\x090x0000010000000013",
        "\\x090x0000020c00000000",
        "\\x090x1000",
        "\\x090x0",
    ]);
    expect(&log, "0x100", Permission, Execute, Some(0x1000));
    let log = log.replace("0x13", "0x02").replace("000013", "000002");
    expect(&log, "0x100", DeviceEntry, Unknown, None);

    let decoded = "arm-smmu-v3 arm-smmu-v3.0.auto: event: F_TRANSLATION client: 0000:01:00.0 sid: 0x100 ssid: 0x0 iova: 0xfff00000 ipa: 0x0\n\
        arm-smmu-v3 arm-smmu-v3.0.auto: unpriv data write s1 \"Input address caused fault\" stag: 0x0\n";
    let fault = expect(decoded, "0000:01:00.0", NotMapped, Write, Some(0xfff0_0000));
    assert_eq!((fault.id, fault.pasid), (Some(0x100), None));

    let all = "arm-smmu-v3 arm-smmu-v3.0.auto: event 0x10 received:\n\
        usb 1-1: a line of another\n\
        arm-smmu-v3 arm-smmu-v3.0.auto: \t0x0000010000000010\n\
        arm-smmu-v3 arm-smmu-v3.1.auto: event 0x13 received:\n\
        arm-smmu-v3 arm-smmu-v3.1.auto: \t0x0000020000000013\n\
        arm-smmu-v3 arm-smmu-v3.0.auto: \t0x0000020000000000\n\
        arm-smmu-v3 arm-smmu-v3.0.auto: \t0x00000000fff00000\n\
        arm-smmu-v3 arm-smmu-v3.0.auto: \t0x0000000000000000\n";
    let both = faults(&format!("{all}{decoded}"));
    let counts: Vec<_> = both
        .iter()
        .map(|fault| (fault.device().unwrap(), fault.lines.len()))
        .collect();
    assert_eq!(
        counts,
        [("0000:01:00.0".to_owned(), 7), ("0x200".to_owned(), 2)]
    );
    assert_eq!(both[0].access, Write);

    let named = fault_of("event: C_BAD_STE client: ae00000.display sid: 0x8 ssid: 0x0");
    assert_eq!(
        (named.class, named.client.as_deref(), named.id),
        (DeviceEntry, Some("ae00000.display"), Some(8))
    );
    let fetch = fault_of(
        "event: F_STE_FETCH client: (unassigned sid) sid: 0x8 ssid: 0x0 fetch_addr: 0x1000",
    );
    assert_eq!(
        (fetch.device().as_deref(), fetch.field("fetch address")),
        (Some("0x8"), Some(0x1000))
    );
}

fn fault_of(text: &str) -> FaultRecord {
    fault(&format!("arm-smmu-v3 arm-smmu-v3.0.auto: {text}"))
}

#[test]
fn smmuv3_errors_of_the_unit() {
    let log = "arm-smmu-v3 x: unexpected global error reported (0x00000001), this could be serious\n\
        arm-smmu-v3 x: CMDQ error (cons 0x030120b7): ATC invalidate timeout\n\
        arm-smmu-v3 x: skipping command in error state:\n\
        arm-smmu-v3 x: \t0x0000000000000040\n\
        arm-smmu-v3 x: \t0x0000000000000000";
    expect(log, "", Class::UnitError, FaultAccess::Unknown, None);
    expect(
        "arm-smmu-v3 x: CMDQ timeout",
        "",
        Class::UnitError,
        FaultAccess::Unknown,
        None,
    );
    expect(
        "arm-smmu-v3 x: CMD_SYNC timeout at 0x00000a3e [hwprod 0x00000a3f, hwcons 0x00000a1b]",
        "",
        Class::UnitError,
        FaultAccess::Unknown,
        None,
    );
    let lost = events("arm-smmu-v3 x: EVTQ overflow detected -- events lost");
    assert!(matches!(lost[..], [LogEvent::Overflow(_)]));
}

#[test]
fn smmuv2_heads_with_their_registers_are_one_fault() {
    use FaultAccess::{Execute, Read, Write};
    let log = "arm-smmu 15000000.iommu: Unhandled context fault: fsr=0x402, iova=0xfd7ff000, fsynr=0x540003, cbfrsynra=0x19c3, cb=10\n\
        arm-smmu 15000000.iommu: FSR    = 00000402 [TF ], SID=0x19c3\n\
        arm-smmu 15000000.iommu: FSYNR0 = 00540003 [S1CBNDX=84 PLVL=3]\n\
        arm-smmu 15000000.iommu: soft iova-to-phys=0x0000000000000000";
    let fault = expect(log, "0x19c3", Class::NotMapped, Read, Some(0xfd7f_f000));
    assert_eq!(
        (
            fault.field("soft iova-to-phys"),
            fault.field("context bank")
        ),
        (Some(0), Some(10))
    );
    let log =
        "arm-smmu 5000000.iommu: Unhandled context fault: fsr=0x408, iova=0x1000, fsynr=0x11, cb=2";
    expect(log, "", Class::Permission, Write, Some(0x1000));
    let log = "arm-smmu 5000000.iommu: Unhandled context fault: iova=0x00001000, fsr=0x402, fsynr=0x41, cb=2";
    expect(log, "", Class::NotMapped, Execute, Some(0x1000));
    let log = "arm-smmu 15000000.iommu: Unhandled context fault: fsr=0x402\n,iova=0xd65504710, fsynr=0x100011, cbfrsynra=0x0, cb=6";
    expect(log, "0x0", Class::NotMapped, Write, Some(0xd_6550_4710));
    let log = "arm-smmu 5000000.iommu: Unexpected global fault, this could be serious\n\
        arm-smmu 5000000.iommu: \tGFSR 0x80000002, GFSYNR0 0x00000002, GFSYNR1 0x00000421, GFSYNR2 0x00000000";
    let fault = expect(log, "0x421", Class::DeviceEntry, Write, None);
    assert_eq!(fault.flags, ["USF", "MULTI"]);
    let log = "arm-smmu 5000000.iommu: Blocked unknown Stream ID 0x421; boot with \"arm-smmu.disable_bypass=0\" to allow, but this may have security implications\n\
        arm-smmu 5000000.iommu: \tGFSR 0x00000002, GFSYNR0 0x00000000, GFSYNR1 0x00000421, GFSYNR2 0x00000000";
    expect(log, "0x421", Class::DeviceEntry, Read, None);
    let alone =
        super::fault("arm-smmu 5000000.iommu: Unexpected global fault, this could be serious");
    assert_eq!(alone.class, Class::Unknown);
    let bursts = "arm-smmu x: Unhandled context fault: fsr=0x402, iova=0x1000, fsynr=0x0, cbfrsynra=0x800, cb=7\n".repeat(40);
    assert_eq!(faults(&bursts).len(), 40);
}

#[test]
fn other_units() {
    use Class::{DeviceEntry, NoAccess, NotMapped};
    use FaultAccess::{Execute, Read, Unknown, Write};
    let f = expect;
    f(
        "riscv-iommu 0000:00:01.0: Fault 12 devid: 0x8 iotval: 1000 iotval2: 0",
        "0x8",
        NoAccess,
        Execute,
        Some(0x1000),
    );
    let second = f(
        "riscv,iommu 10000000.iommu: Fault 23 devid: 0x8 iotval: 1000 iotval2: 80001003",
        "0x8",
        NoAccess,
        Write,
        Some(0x1000),
    );
    assert_eq!(
        (second.stage, second.ipa),
        (Some(Stage::Two), Some(0x8000_1000))
    );
    f(
        "riscv-iommu x: Fault 258 devid: 0x8 iotval: 1000 iotval2: 0",
        "0x8",
        DeviceEntry,
        Unknown,
        Some(0x1000),
    );
    f(
        "apple-dart 231304000.iommu: translation fault: status:0x80000004 stream:0 code:0x4 (NO PTE FOR IOVA) at 0xb0dcb000",
        "0x0",
        NotMapped,
        Unknown,
        Some(0xb0dc_b000),
    );
    f(
        "sun50i-iommu 30f0000.iommu: Page fault for 0xfff00000 (master 1, dir wr)",
        "0x1",
        NoAccess,
        Write,
        Some(0xfff0_0000),
    );
    f(
        "rk_iommu ff460f00.iommu: Page fault at 0x00000000f7c00000 of type read\nrk_iommu ff460f00.iommu: iova = 0x00000000f7c00000: dte_index: 0x3df pte_index: 0x0 page_offset: 0x0\nrk_iommu ff460f00.iommu: mmu_dte_addr: 0x000000007c2a5000 dte@0x000000007c2a5f7c: 0x7c2a6001 valid: 1 pte@0x000000007c2a6000: 0x000000 valid: 0 page@0x0000000000000000 flags: 0x0",
        "",
        NoAccess,
        Read,
        Some(0xf7c0_0000),
    );
    let likely = fault(
        "mtk-iommu 10205000.iommu: fault type=0x280 iova=0x1000 pa=0x0 master=0xa(larb=0 port=8) layer=1 read",
    );
    assert_eq!(
        facts(&likely),
        (
            "0xa".into(),
            NoAccess,
            Certainty::Likely,
            Read,
            Some(0x1000)
        )
    );
    let exynos = fault(
        "exynos-sysmmu 13620000.sysmmu: 12340000.codec: [WRITE] PAGE FAULT occurred at 0x20000000",
    );
    assert_eq!(
        facts(&exynos),
        (
            "12340000.codec".into(),
            NotMapped,
            Certainty::Likely,
            Write,
            Some(0x2000_0000)
        )
    );
    let tegra = fault(
        "tegra-mc 70019000.memory-controller: gpusrd: read @0x0000000102500000: Page fault (SMMU translation error [--S])",
    );
    assert_eq!(
        facts(&tegra),
        (
            "gpusrd".into(),
            NoAccess,
            Certainty::Likely,
            Read,
            Some(0x1_0250_0000)
        )
    );
    let virtio = fault("virtio_iommu virtio0: page fault from EP 8 at 0x1000 [RW]");
    assert_eq!((virtio.family, virtio.access), (Family::Virtio, Write));
    let ipmmu =
        fault("ipmmu-vmsa febd0000.iommu: Unhandled fault: status 0x00000001 iova 0x70000000");
    assert_eq!(
        facts(&ipmmu),
        (
            String::new(),
            NotMapped,
            Certainty::Likely,
            Unknown,
            Some(0x7000_0000)
        )
    );
    let omap = fault(
        "omap-iommu 55082000.mmu: 55082000.mmu: errs:0x00000002 da:0x9f000000 pgd:0xffff0000 *pgd:px00000000",
    );
    assert_eq!(
        facts(&omap),
        (
            String::new(),
            NotMapped,
            Certainty::Likely,
            Unknown,
            Some(0x9f00_0000)
        )
    );
}

#[test]
fn the_kernel_stops_for_the_fault_before() {
    let log = "exynos-sysmmu 13620000.sysmmu: 12340000.codec: [READ] PAGE FAULT occurred at 0x20000000\n\
        Kernel panic - not syncing: Unrecoverable System MMU Fault!";
    assert_eq!(fault(log).lines, [1, 2]);
}

#[test]
fn lines_wrapped_in_mails_are_joined() {
    let smmu = "> [1.0] arm-smmu-v3 arm-smmu-v3.3.auto: event: F_TRANSLATION\n\
        > client: 0000:75:00.1 sid: 0x7501 ssid: 0x1 iova: 0xaaaada7af000 ipa:\n\
        > 0xaaaada7af000\n\
        > [1.0] arm-smmu-v3 arm-smmu-v3.3.auto: unpriv data write s1 \"Input address caused fault\" stall stag: 0x0\n";
    let fault = fault(smmu);
    assert_eq!(
        (fault.pasid, fault.access, fault.id),
        (Some(1), FaultAccess::Write, Some(0x7501))
    );
    let vtd = "> > DMAR: [DMA Write NO_PASID] Request device [20:00.0] fault addr\n> >0x1234600000\n> > [fault reason 0x71] SM: Present bit in first-level paging entry is clear";
    let fault = super::fault(vtd);
    assert_eq!(
        (fault.class, fault.lines),
        (Class::NotMapped, vec![1, 2, 3])
    );
    let soft = "[23560.957541] DMAR: [DMA Write NO_PASID] Request device [3e:00.0] fault ad=\ndr 0x7efef4f08000 [fault reason 0x79] SM: Read/Write permission error in";
    assert_eq!(super::fault(soft).address.unwrap().value, 0x7efe_f4f0_8000);
    let soft = "[ 5959.338214] vfio-pci 0000:04:10.0: AMD-Vi: Event logged [IO_PAGE_FAULT d=\nomain=3D0x0037 address=3D0x7b657064 flags=3D0x0000]";
    expect(
        soft,
        "0000:04:10.0",
        Class::NotMapped,
        FaultAccess::Unknown,
        Some(0x7b65_7064),
    );
    let terminal = "[1.0] DMAR: [DMA Write NO_PASID] Request device [01:00.0] fault ad\ndr 0xff3a6000 [fault reason 0x05] PTE Write access is not set";
    expect(
        terminal,
        "0000:01:00.0",
        Class::NoAccess,
        FaultAccess::Write,
        Some(0xff3a_6000),
    );
    let reason = "[1.0] DMAR: [DMA Write NO_PASID] Request device [01:00.0] fault addr 0xff3a6000 [fault reason\n0x05] PTE Write access is not set";
    expect(
        reason,
        "0000:01:00.0",
        Class::NoAccess,
        FaultAccess::Write,
        Some(0xff3a_6000),
    );
    let dart = "apple-dart 285800000.iommu: translation fault: status:0x80040008 stream:0\ncode:0x8 (NO PTE FOR IOVA) at 0x28e084008";
    expect(
        dart,
        "0x0",
        Class::NotMapped,
        FaultAccess::Unknown,
        Some(0x2_8e08_4008),
    );
}

#[test]
fn illegible_addresses_are_none() {
    let log = "(XEN) AMD-Vi: IO_PAGE_FAULT: 0000:03:00.0 d0 addr ffffff???????000 flags 0x8 I";
    expect(
        log,
        "0000:03:00.0",
        Class::InterruptRequest,
        FaultAccess::Unknown,
        None,
    );
}

#[test]
fn tegra_reports_a_fault_twice() {
    let log = "tegra-mc 70019000.memory-controller: display0a: read @0xfe056b40:\n\
        \t EMEM address decode error (SMMU translation error [--S])\n\
        tegra-mc 70019000.memory-controller: display0a: read @0xfe056b40: Page fault (SMMU translation error [--S])\n\
        tegra-mc 70019000.memory-controller: display0a: read @0xfe057000: Page fault (SMMU translation error [--S])";
    let faults = faults(log);
    let lines: Vec<_> = faults.iter().map(|fault| fault.lines.len()).collect();
    assert_eq!(lines, [3, 1]);
}

#[test]
fn kernels_of_vendors() {
    let log = "\
        <3>[  718.314900][  T803] arm-smmu 15000000.apps-smmu: Unhandled arm-smmu context fault from a600000.dwc3!\n\
        <3>[  718.314994][  T803] arm-smmu 15000000.apps-smmu: FAR    = 0x00000000efe60800\n\
        <3>[  718.315023][  T803] arm-smmu 15000000.apps-smmu: PAR    = 0x0000000000000000\n\
        <3>[  718.315048][  T803] arm-smmu 15000000.apps-smmu: FSR    = 0x40000402 [TF R SS ]\n\
        <3>[  718.315074][  T803] arm-smmu 15000000.apps-smmu: FSYNR0    = 0x5f0003\n\
        <3>[  718.315096][  T803] arm-smmu 15000000.apps-smmu: FSYNR1    = 0xaa02\n\
        <3>[  718.315117][  T803] arm-smmu 15000000.apps-smmu: context bank#    = 0x1b\n";
    expect(
        log,
        "a600000.dwc3",
        Class::NotMapped,
        FaultAccess::Read,
        Some(0xefe6_0800),
    );
    let log = "PAGE FAULT occurred at 0x20400000 by 14ea0000.sysmmu(Page table base: 0x6e820000)";
    let old = fault(log);
    assert_eq!(
        facts(&old),
        (
            String::new(),
            Class::NotMapped,
            Certainty::Likely,
            FaultAccess::Unknown,
            Some(0x2040_0000)
        )
    );
    assert_eq!(old.unit.as_deref(), Some("14ea0000.sysmmu"));
    let log = "AW ACCESS PROTECTION FAULT occured at 0x20400000 by 14ea0000.sysmmu(Page table base: 0x6e820000)";
    assert_eq!(
        facts(&fault(log)),
        (
            String::new(),
            Class::Permission,
            Certainty::Likely,
            FaultAccess::Write,
            Some(0x2040_0000)
        )
    );
}

#[test]
fn xen_has_forms_of_its_own() {
    let log = "(XEN) [VT-D]DMAR:[DMA Read] Request device [0000:00:02.0] fault addr 7d000000\n\
        (XEN) [VT-D]DMAR: reason 0c - non-zero reserved fields in PTE";
    expect(
        log,
        "0000:00:02.0",
        Class::BadTable,
        FaultAccess::Read,
        Some(0x7d00_0000),
    );
    let log = "(XEN) [VT-D]iommu.c:859: DMAR:[DMA Read] Request device [00:1a.0] fault addr 30df0000, iommu reg = ffff82c3ffd54000\n\
        (XEN) DMAR:[fault reason 06h] PTE Read access is not set";
    expect(
        log,
        "0000:00:1a.0",
        Class::NoAccess,
        FaultAccess::Read,
        Some(0x30df_0000),
    );
    let log = "(XEN) AMD-Vi: IO_PAGE_FAULT: 0000:03:00.0 d3 addr 0000000000001000 flags 0x70";
    let fault = expect(
        log,
        "0000:03:00.0",
        Class::Permission,
        FaultAccess::Write,
        Some(0x1000),
    );
    assert_eq!(fault.domain, Some(3));
    let log = "(XEN) AMD-Vi: IO_PAGE_FAULT: domain = 0, device id = 0x0300, fault address = 0x1000, flags = 0x000";
    expect(
        log,
        "0000:03:00.0",
        Class::NotMapped,
        FaultAccess::Unknown,
        Some(0x1000),
    );
}

#[test]
fn templates_and_messages_of_the_boot_are_no_faults() {
    for quiet in [
        "DMAR: fault reporting enabled",
        "arm-smmu-v3 arm-smmu-v3.0.auto: Disabling IOMMU fault",
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=%04x:%02x:%02x.%x domain=0x%04x address=0x%llx flags=0x%04x]",
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=xx:yy.z domain=0xNNNN address=0xADDR flags=0xFLAGS]",
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=.. domain=.. address=.. flags=..]",
        "DMAR: [DMA Write] Request device [xx:xx.x] fault addr 1000 [fault reason 05]",
        "DMAR:[fault reason XX] of DMAR: DRHD %d",
        "arm-smmu-v3 x: event: F_TRANSLATION client: <dev> sid: <sid> ssid: <ssid> iova: <iova> ipa: <ipa>",
        "arm-smmu 5000000.iommu: Unhandled context fault: fsr=0x%x, iova=0x%08lx, fsynr=0x%x, cbfrsynra=0x%x, cb=%d",
        "rk_iommu x: Page fault at %pad of type %s",
        "exynos-sysmmu x: %s: [%s] %s FAULT occurred at %#x",
        "mtk-iommu x: fault type=0x%x iova=0x%llx pa=0x%llx master=0x%x(larb=%d port=%d) layer=%d %s",
        "virtio_iommu virtio0: %s fault from EP %u at %#llx [%s%s%s]",
        "apple-dart x: translation fault: status:0x%x stream:%d code:0x%x (%s) at 0x%llx",
    ] {
        assert_eq!(events(quiet), [], "{quiet}");
    }
}

/// Limiters of other functions: those of a unit's driver are named, all others are none of ours.
#[test]
fn suppressed_messages_of_unknown_functions_are_no_faults() {
    for other in [
        "net_ratelimit",
        "vfio_pci_mmap_fault",
        "gmc_v9_0_process_interrupt",
    ] {
        assert_eq!(events(&format!("{other}: 33 callbacks suppressed")), []);
    }
    let named = events("arm_smmu_new_function: 33 callbacks suppressed");
    assert!(matches!(named[..], [LogEvent::Undecoded(_)]), "{named:?}");
}

#[test]
fn lines_of_others_are_left_alone_and_nothing_is_dropped() {
    for quiet in [
        "usb 1-1: fault in arm-smmu adapter name",
        "DMAR: IOMMU enabled",
        "DMAR: dmar0: Using Queued invalidation",
        "iommu: Default domain type: Translated",
        "amdgpu 0000:03:00.0: amdgpu: [gfxhub] page fault (src_id:0 ring:158 vmid:0 pasid:0)",
        "pci 0000:00:00.2: AMD-Vi: IOMMU performance counters supported",
        "communication error in dartmouth",
    ] {
        assert_eq!(events(quiet), [], "{quiet}");
    }
    for line in [
        "DMAR: an error that nobody has printed before",
        "arm-smmu-v3 x: fault of a new kind",
        "xhci_hcd 0000:01:00.0: AMD-Vi: Event logged [NEW_KIND_OF_FAULT address=0x1000]",
        "AMD-Vi: Event logged [NEW_KIND device=0000:01:00.0 address=0x1000]",
        "DMAR: [DMA Read] Request device [nonsense] fault addr 0",
    ] {
        assert!(
            matches!(events(line)[..], [LogEvent::Undecoded(_)]),
            "{line}: {:?}",
            events(line)
        );
    }
}
