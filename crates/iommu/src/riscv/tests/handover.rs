//! Handing over.

use super::*;
use crate::handover::{Frozen, UnitAdoptError, UnitMemory};

#[test]
fn a_successor_goes_on_in_the_queue_and_with_the_devices() {
    for (capabilities, device_bits) in [(PLAIN, 7), (PLAIN, 16), (RICH, 15), (RICH, 24)] {
        let config = Config {
            device_bits,
            ..PROCESSES
        };
        let (driver, model) = enabled(capabilities, config);
        let (device, tlb) = (DeviceId(0x29), DeviceTlb { queue_depth: 2 });
        driver.set_device_tlb(device, Some(tlb)).unwrap();
        driver.attach(device, DOMAIN, root(0x10_0000, 4)).unwrap();
        let guest = second(0x20_0000, 3);
        driver.attach(DeviceId(1), DomainId(8), guest).unwrap();
        driver
            .attach_pasid(device, Pasid(5), DOMAIN, root(0x10_0000, 4))
            .unwrap();
        let used = driver.memory().in_use();
        model.received();
        let (mut pages, mut tables) = (0, Vec::new());
        let frozen = driver.freeze(&mut |held| match held {
            UnitMemory::Structure { span, .. } => pages += span.len / 4096,
            UnitMemory::Table { domain, root } => tables.push((domain.0, root)),
        });
        let (frozen, _, memory) = frozen.map_err(|(_, cause)| cause).unwrap();
        assert_eq!(pages, used);
        let first = (7, root(0x10_0000, 4));
        assert_eq!(tables, [(8, guest), first, first]);
        assert_eq!(model.received(), [Received::Wait]);

        let frozen = Frozen::from_bytes(&frozen.to_bytes()).unwrap();
        let adopt = |frozen: &Frozen| {
            let adopted = RiscvIommu::adopt(model.clone(), memory.clone(), config, frozen);
            adopted.map_err(|error| match error {
                UnitAdoptError::Register { name, .. } => name,
                other => panic!("{other}"),
            })
        };
        for (csr, bits, name) in [(72, 1 << 8, "cqcsr"), (76, 1 << 16, "fqcsr")] {
            *model.state().csrs.get_mut(&csr).unwrap() ^= bits;
            assert_eq!(adopt(&frozen).err(), Some(name));
            *model.state().csrs.get_mut(&csr).unwrap() ^= bits;
        }
        *model.state().places.get_mut(&36).unwrap() ^= 1;
        assert_eq!(adopt(&frozen).err(), Some("cqh"));
        *model.state().places.get_mut(&36).unwrap() ^= 1;
        model.state().fctl = 4;
        assert_eq!(adopt(&frozen).err(), Some("fctl"));
        model.state().fctl = 0;

        let heir = adopt(&frozen).unwrap();
        // It has received the unit nothing.
        assert_eq!(model.received(), []);
        let again = heir.attach(device, DOMAIN, root(0x10_0000, 4));
        assert!(matches!(
            again,
            Err(UnitAttachError::AlreadyAttached { .. })
        ));
        heir.invalidate_domain(DOMAIN).unwrap();
        assert_eq!(heir.counters().waits, 1);
        let segments = device_bits > 16;
        let tlb = |process| Received::Tlb(0x29, segments, process, (0, 52));
        let expected = [
            whole(7),
            Received::Fence,
            tlb(None),
            tlb(Some(5)),
            Received::Wait,
        ];
        assert_eq!(model.received(), expected);
        heir.detach(device).unwrap();
        heir.detach_pasid(device, Pasid(5)).unwrap();
        heir.detach(DeviceId(1)).unwrap();
        drop(heir.tear_down().unwrap());
        assert_eq!(memory.in_use(), 0);
        model.received();
        assert_eq!(adopt(&frozen).err(), Some("ddtp"));
    }
}
