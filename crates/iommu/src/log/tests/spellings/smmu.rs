//! SMMUv3 and SMMUv2: heads, and the lines of registers below them.

use super::super::{events, fault, faults};
use super::expect;
use crate::log::{Class, FaultAccess, FaultRecord, LogEvent, Stage};

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
