//! PASIDs.

use super::*;

const PASIDS: Config = Config {
    pasid_bits: 8,
    ..CONFIG
};
const PASID: Pasid = Pasid(0x83);

#[test]
fn a_device_has_tables_of_one_stage_at_a_time() {
    let (driver, _) = enabled(PASIDS);
    let refused = |pasid, root| {
        driver
            .attach_pasid(DEVICE, pasid, DOMAIN, root)
            .unwrap_err()
    };
    let format = second(0x1000).format;
    assert_eq!(
        refused(PASID, second(0x1000)),
        UnitAttachError::Format { format }
    );
    let none = UnitAttachError::NotAttached { device: DEVICE };
    assert_eq!(driver.detach_pasid(DEVICE, PASID), Err(none));
    // One stage at a time.
    let other = UnitAttachError::OtherStage { device: DEVICE };
    driver.attach(DEVICE, DomainId(8), second(0x1000)).unwrap();
    assert_eq!(refused(PASID, root(0x1000)), other);
    assert_eq!(driver.detach_pasid(DEVICE, PASID), Err(none));
    driver.detach(DEVICE).unwrap();
    driver
        .attach_pasid(DEVICE, PASID, DOMAIN, root(0x1000))
        .unwrap();
    assert_eq!(
        driver.attach(DEVICE, DomainId(8), second(0x1000)),
        Err(other)
    );
}
