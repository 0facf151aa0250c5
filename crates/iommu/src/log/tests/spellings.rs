//! Spellings of kernels since 2.6, and facts by unit: in this file units of other vendors, and lines of all.

mod amdvi;
mod smmu;
mod vtd;

use super::{events, fault, faults};
use crate::log::{Certainty, Class, Family, FaultAccess, FaultRecord, LogEvent, Stage};

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
