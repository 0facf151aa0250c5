//! Units that do not answer, or do not keep what they are given: everything ends, with a name.

use super::*;

#[test]
fn a_sync_that_never_ends_fails_the_flush() {
    let (driver, model, memory) = enabled();
    let host = first(&memory, 0);
    driver.attach(DEVICE, DOMAIN, host.root()).unwrap();
    let guest = second(&memory, 40);
    let (other, theirs) = (DeviceId(9), DomainId(9));
    driver.attach(other, theirs, guest.root()).unwrap();
    let page = iopt::Invalidation::of(Span::new(0x3000, 0x1000), 1, false);
    let before = driver.counters();
    model.state().broken.bank_sync = true;
    let cause = timed_out("TLBSTATUS.SACTIVE = 0");
    for domain in [DOMAIN, theirs] {
        let failed = Err(FlushError::Unit { domain, cause });
        assert_eq!(driver.invalidate(domain, &page), failed);
    }
    let (domain, theirs_failed) = (DOMAIN, timed_out("TLBGSTATUS.GSACTIVE = 0"));
    let failed = Err(FlushError::Unit { domain, cause });
    assert_eq!(driver.invalidate_domain(DOMAIN), failed);
    // The global one is another.
    driver.invalidate_domain(theirs).unwrap();
    model.state().broken.global_sync = true;
    let domain = theirs;
    let cause = theirs_failed;
    let failed = Err(FlushError::Unit { domain, cause });
    assert_eq!(driver.invalidate_domain(theirs), failed);
    let after = driver.counters();
    assert_eq!(after.batches - before.batches, 5);
    assert_eq!(after.waits - before.waits, 1, "of the one that ended");
    assert_eq!(driver.enable(), Err(cause));
    assert_eq!(driver.disable(), Err(cause));
    // The same unit, repaired.
    model.state().broken = model::Broken::default();
    driver.enable().unwrap();
    driver.invalidate(DOMAIN, &page).unwrap();
    assert_eq!(model.access(STREAM, 0, false), Seen::Translated(DATA));
}

#[test]
fn a_stream_register_that_does_not_keep_its_bits_is_refused_and_lets_nothing_through() {
    // Bit 5 of the id, a bit of the mask, the valid bit; the bank's number.
    for (match_bits, context_bits, register) in [
        (1 << 5, 0, "SMR"),
        (1 << 24, 0, "SMR"),
        (1 << 31, 0, "SMR"),
        (0, 1 << 1, "S2CR"),
    ] {
        let memory = memory();
        let config = Config {
            ignored: 0x100,
            ..V2
        };
        let (driver, model) = unit_with(memory.clone(), config, [IDR0, IDR1, IDR2]);
        driver.enable().unwrap();
        let table = first(&memory, 0);
        model.state().broken.match_bits = match_bits;
        model.state().broken.context_bits = context_bits;
        let refused = driver.attach(DEVICE, DOMAIN, table.root()).unwrap_err();
        let UnitAttachError::Unit { cause, .. } = refused else {
            panic!("{refused}");
        };
        assert!(
            matches!(cause, UnitError::Refused { register: there, .. } if there == register),
            "{cause}"
        );
        for stream in 0..0x400 {
            assert_eq!(model.access(stream, 0, false), NOT_MAPPED);
        }
        assert!(matches!(
            driver.attach(DEVICE, DOMAIN, table.root()),
            Err(UnitAttachError::AlreadyAttached { .. })
        ));
        model.state().broken = model::Broken::default();
        driver.detach(DEVICE).unwrap();
        driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
        assert_eq!(model.access(STREAM, 0, false), Seen::Translated(DATA));
        model.received();
    }
}

#[test]
fn enabling_names_a_stream_that_was_refused_and_has_the_others_translated() {
    let memory = memory();
    let (driver, model) = unit_with(memory.clone(), V2, [IDR0, IDR1, IDR2]);
    let table = first(&memory, 0);
    // It is the first, with bit 5.
    driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
    driver.attach(DeviceId(2), DOMAIN, table.root()).unwrap();
    model.state().broken.match_bits = 1 << 5;
    assert!(matches!(
        driver.enable(),
        Err(UnitError::Refused {
            register: "SMR",
            ..
        })
    ));
    assert_eq!(model.access(STREAM, 0, false), NOT_MAPPED);
    assert_eq!(model.access(2, 0, false), Seen::Translated(DATA));
    model.state().broken = model::Broken::default();
    driver.enable().unwrap();
    assert_eq!(model.access(STREAM, 0, false), Seen::Translated(DATA));
}

#[test]
fn a_unit_that_does_not_let_streams_fault_is_refused() {
    let (driver, model) = unit_with(memory(), V2, [IDR0, IDR1, IDR2]);
    // USFCFG.
    model.state().broken.control_bits = 1 << 10;
    let refused = UnitError::Refused {
        register: "CR0",
        value: ON & !(1 << 10),
    };
    assert_eq!(driver.enable(), Err(refused));
}
