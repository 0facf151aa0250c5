//! Handing over.

use super::*;
use crate::handover::{Frozen, UnitAdoptError, UnitMemory};

#[test]
fn a_successor_goes_on_in_the_queue_and_with_the_devices() {
    let config = Config {
        pasid_bits: 8,
        device_tlbs: true,
        ..CONFIG
    };
    for msi in [0, MSI] {
        let mut ids = IDS;
        ids[0] |= msi;
        let (driver, model) = enabled_with(ids, config);
        let (other, third) = (DeviceId(5), DeviceId(0x200));
        driver
            .set_device_tlb(DEVICE, Some(DeviceTlb { queue_depth: 1 }))
            .unwrap();
        driver.attach(DEVICE, DOMAIN, root(0x10_0000)).unwrap();
        let high = DomainId(0x9001);
        let pasid = Pasid(0x83);
        driver
            .attach_pasid(DEVICE, pasid, high, root(0x20_0000))
            .unwrap();
        driver
            .attach(other, DomainId(8), second(0x30_0000))
            .unwrap();
        // It has a page of the second level, and nothing in it.
        driver.attach(third, DOMAIN, root(0x10_0000)).unwrap();
        driver.detach(third).unwrap();
        let used = driver.memory().in_use();
        model.received();
        let (mut pages, mut tables) = (0, Vec::new());
        let frozen = driver.freeze(&mut |held| match held {
            UnitMemory::Structure { span, .. } => pages += span.len / 4096,
            UnitMemory::Table { domain, root } => tables.push((domain, root)),
        });
        let (frozen, _, memory) = frozen.map_err(|(_, cause)| cause).unwrap();
        // But two pages of notes about domains.
        assert_eq!((pages, memory.in_use()), (used - 2, used - 2));
        let attached = [
            (DomainId(8), second(0x30_0000)),
            (DOMAIN, root(0x10_0000)),
            (high, root(0x20_0000)),
        ];
        assert_eq!(tables, attached);
        assert_eq!(model.received(), [Received::Sync]);

        let frozen = Frozen::from_bytes(&frozen.to_bytes()).unwrap();
        let adopt = |frozen: &Frozen| SmmuV3::adopt(model.clone(), memory.clone(), config, frozen);
        let refused = |frozen: &Frozen| match adopt(frozen) {
            Err(UnitAdoptError::Register { name, .. }) => name,
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("adopted"),
        };
        model.state().gerror ^= 1;
        assert_eq!(refused(&frozen), "SMMU_GERROR");
        model.state().gerror ^= 1;
        let other_config = Config {
            last_device: 0xffff,
            ..config
        };
        let other_size = SmmuV3::adopt(model.clone(), memory.clone(), other_config, &frozen);
        let Err(UnitAdoptError::Register { name, .. }) = other_size else {
            panic!("adopted");
        };
        assert_eq!(name, "the stream table's shape");
        assert_eq!(memory.in_use(), used - 2);

        let heir = adopt(&frozen).unwrap();
        // It has received the unit nothing.
        assert_eq!(model.received(), []);
        let again = heir.attach(DEVICE, DOMAIN, root(0x10_0000));
        assert!(matches!(
            again,
            Err(UnitAttachError::AlreadyAttached { .. })
        ));
        for (domain, received) in [
            (DomainId(8), vec![Received::Vmid(8), Received::Sync]),
            (
                high,
                vec![
                    whole(0x9001),
                    Received::Sync,
                    Received::Device(STREAM, Some(0x83), 0, 52),
                    Received::Sync,
                ],
            ),
        ] {
            heir.invalidate_domain(domain).unwrap();
            assert_eq!(model.received(), received);
        }
        assert_eq!(heir.counters().waits, 2);
        assert_eq!(found(model.look_up(5, None)), Some((8, second(0x30_0000))));
        heir.detach_pasid(DEVICE, pasid).unwrap();
        heir.detach(DEVICE).unwrap();
        heir.detach(other).unwrap();
        model.received();
        drop(heir.tear_down().unwrap());
        assert_eq!(memory.in_use(), 0);
    }
}
