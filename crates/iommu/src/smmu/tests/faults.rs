//! Faults as named records.

use iopt::TableOps as _;
use iopt::walk::Access;

use super::*;
use crate::fault::FaultReason;

#[test]
fn faults_name_device_domain_address_and_cause() {
    let (driver, model, memory) = enabled();
    let mut table = first(&memory, 0);
    let page = [Span::new(DATA, 0x1000)];
    table.map(0x20_0000, &page, Prot::READ).unwrap();
    driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
    let guest = second(&memory, 40);
    driver
        .attach(DeviceId(9), DomainId(9), guest.root())
        .unwrap();
    assert_eq!(drain(&driver), (Vec::new(), 0));

    assert_eq!(model.access(STREAM, 0x20_0123, true), Seen::Context(3));
    assert_eq!(model.access(9, 0xab_cdef_0123, false), NOT_PRESENT);
    assert_eq!(model.access(0x77, 0xffff_1234_5678, true), NOT_MAPPED);
    // Accesses that fault meanwhile are lost, and hold up no other stream.
    assert_eq!(model.access(STREAM, 0x40_0000, false), NOT_PRESENT);
    assert_eq!(model.access(STREAM, 0, false), Seen::Translated(DATA));
    let (faults, lost) = drain(&driver);
    assert_eq!(lost, 1);
    let said: Vec<_> = faults.iter().map(ToString::to_string).collect();
    assert_eq!(
        said,
        [
            "00:0e.7: write of 0xffff12345000: USF: the stream is not mapped (reason 0x2)",
            "00:01.1 (domain 9): read of 0xabcdef0000: TF: not present (reason 0x2)",
            "01:04.3 (domain 65543): write of 0x200000: PF: not allowed (reason 0x8)",
        ]
    );
    assert_eq!(
        faults[2],
        Fault {
            device: DEVICE,
            pasid: None,
            domain: Some(DOMAIN),
            iova: 0x20_0000,
            access: Some(Access::Write),
            reason: FaultReason::Reported {
                code: 8,
                meaning: "PF: not allowed",
                details: crate::Details::default(),
            },
        }
    );
    assert_eq!(drain(&driver), (Vec::new(), 0));
    // There is room again.
    assert_eq!(model.access(STREAM, 0x40_0000, false), NOT_PRESENT);
    assert_eq!(drain(&driver).0.len(), 1);
}

#[test]
fn every_bit_has_a_name_and_is_cleared() {
    let (driver, model, memory) = enabled();
    let table = first(&memory, 0);
    driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
    let names = |register: &str, bits: std::ops::Range<u32>| {
        let names = bits.map(|bit| {
            match register {
                "GFSR" => model.state().put("GFSR", 1 << bit),
                _ => model.state().put_bank(2, register, 1 << bit),
            }
            let (faults, lost) = drain(&driver);
            assert_eq!((faults.len(), lost), (1, 0));
            let FaultReason::Reported { code, meaning, .. } = faults[0].reason else {
                panic!("{}", faults[0]);
            };
            assert_eq!(code, 1 << bit);
            // A bank's interrupt, and a register of the unit: no device's request.
            let request = register != "GFSR" || !matches!(bit, 4 | 5);
            assert_eq!(faults[0].access.is_some(), request, "{meaning}");
            assert_eq!(drain(&driver), (Vec::new(), 0));
            meaning.split_once(':').unwrap().0
        });
        names.collect::<Vec<_>>()
    };
    let global = [
        "ICF", "USF", "SMCF", "UCBF", "UCIF", "CAF", "EF", "PF", "UUT",
    ];
    assert_eq!(names("GFSR", 0..9), global);
    let context = ["TF", "AFF", "PF", "EF", "TLBMCF", "TLBLKF", "ASF", "UUT"];
    assert_eq!(names("FSR", 1..9), context);
    // Only that there were more.
    model.state().put("GFSR", 1 << 31);
    assert_eq!(drain(&driver), (Vec::new(), 1));
    assert_eq!(drain(&driver), (Vec::new(), 0));
}

#[test]
fn faults_name_devices_without_the_bits_that_are_not_compared() {
    let memory = memory();
    let config = Config {
        ignored: 0x7c00,
        ..V2
    };
    let (driver, model) = unit_with(memory.clone(), config, [IDR0, IDR1, IDR2]);
    driver.enable().unwrap();
    driver
        .attach(DEVICE, DOMAIN, first(&memory, 0).root())
        .unwrap();
    assert_eq!(model.access(0x7d23, 0x10_0000, false), NOT_PRESENT);
    assert_eq!(model.access(0x4001, 0x1000, false), NOT_MAPPED);
    let (faults, _) = drain(&driver);
    assert_eq!(faults[0].device, DeviceId(1));
    assert_eq!(faults[1].device, DEVICE);
}

#[test]
fn faults_of_a_unit_that_is_not_ours_are_left_alone() {
    let (driver, model) = unit_with(memory(), V2, [IDR0, IDR1, IDR2]);
    model.state().put("GFSR", 1 << 1);
    assert_eq!(drain(&driver), (Vec::new(), 0));
    assert_eq!(model.state().get("GFSR"), 1 << 1);
}
