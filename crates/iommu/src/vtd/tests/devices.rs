//! TLBs in devices.

use super::*;

const DEPTH: DeviceTlb = DeviceTlb { queue_depth: 31 };

#[test]
fn a_unit_without_a_queue_serves_no_tlb() {
    let (driver, _) = enabled(CAP, (ECAP | DEVICE_TLBS) & !QUEUED, Mode::Legacy);
    assert!(!driver.capabilities().device_tlbs);
    let device = DEVICE;
    let refusal = Err(UnitAttachError::NoDeviceTlbs { device });
    assert_eq!(driver.set_device_tlb(device, Some(DEPTH)), refusal);
}

/// PFSID, which the model looks at; and a depth of 32, of which 0 is said.
#[test]
fn a_unit_that_counts_is_told_for_whom() {
    for mode in [Mode::Legacy, Mode::ScalableSecond] {
        let (driver, model) = enabled(CAP, ECAP | SCALABLE_BOTH | DEVICE_TLBS | 1 << 41, mode);
        let all = DeviceTlb { queue_depth: 32 };
        driver.set_device_tlb(DEVICE, Some(all)).unwrap();
        driver.attach(DEVICE, DOMAIN, root(0x1000, 4)).unwrap();
        driver.invalidate_domain(DOMAIN).unwrap();
        let told = Received::Device(SOURCE, 0, 0, 0, 52);
        assert!(received(&model).contains(&told));
    }
}

#[test]
fn a_device_that_does_not_answer_fails_the_flush() {
    let (driver, model) = enabled(CAP, ECAP | DEVICE_TLBS, Mode::Legacy);
    driver.set_device_tlb(DEVICE, Some(DEPTH)).unwrap();
    driver.attach(DEVICE, DOMAIN, root(0x1000, 4)).unwrap();
    // Enabling was three descriptors; the second of this batch is the device's.
    model.state().broken.stops = Some((1 << 6, 4));
    let failed = driver.invalidate_domain(DOMAIN).unwrap_err();
    let FlushError::Unit {
        cause: UnitError::Command { error, command, .. },
        ..
    } = failed
    else {
        panic!("{failed}");
    };
    assert!(error.starts_with("ITE"), "{error}");
    assert_eq!(command[0] & 0xf, 3);
    // The wait behind it was answered to no one.
    assert_eq!(received(&model).len(), 3);
    driver.invalidate_domain(DOMAIN).unwrap();
    assert_eq!(received(&model).len(), 3);
}
