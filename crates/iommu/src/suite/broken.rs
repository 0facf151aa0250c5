//! Units that do not answer, stop, or keep a register as it is.
//!
//! Every wait is bounded, and ends with the name of the awaited condition. A command without an answer is not done: a
//! flush has failed and is flushed again, a device whose detach has failed has no translation and counts as attached
//! until a second one succeeds. Late answers are answers to no later batch. A unit that stops at a command fails one
//! batch, by the error's name with the command and the unit's record, and serves the next. A register that does not
//! follow fails what was asked for, and works again once it is mended.

use super::*;

fn failed<V: fmt::Debug>(result: Result<V, FlushError>) -> UnitError {
    match result {
        Err(FlushError::Unit { cause, .. }) => cause,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn a_wait_that_is_not_answered_ends_and_fails_the_flush<G: Rig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (device, domain) = (G::DEVICE, G::DOMAIN);
    let (driver, model) = rig.attached();
    rig.break_down(&model, Breakage::Mute);
    let (cause, before) = (rig.timed_out(), driver.counters());
    let expected = Err(FlushError::Unit { domain, cause });
    assert_eq!(driver.invalidate_domain(domain), expected);
    // A detach that was not answered leaves the device without translation, and attached.
    let expected = Err(UnitAttachError::Unit { device, cause });
    assert_eq!(driver.detach(device), expected);
    let after = driver.counters();
    assert_eq!(after.batches - before.batches, 2);
    let done = |counters: CommandCounters| (counters.commands, counters.waits);
    assert_eq!(
        done(after),
        done(before),
        "what was not answered is not done"
    );
    assert_eq!(rig.found(&model, G::DEVICE, None), None);
    assert!(matches!(
        driver.attach(device, domain, rig.root()),
        Err(UnitAttachError::AlreadyAttached { .. })
    ));
    rig.break_down(&model, Breakage::None);
    // It does not come back with the unit.
    driver.enable().unwrap();
    assert_eq!(rig.found(&model, G::DEVICE, None), None);
    driver.detach(device).unwrap();
    let gone = Err(UnitAttachError::NotAttached { device });
    assert_eq!(driver.detach(device), gone);
    driver.attach(device, domain, rig.root()).unwrap();
    rig.is_there(&model);
    G::received(&model);
}

pub(crate) fn each_register_that_does_not_follow_is_named<G: Rig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let rows = rig.stuck();
    assert!(!rows.is_empty());
    for ((driver, model), stick, [on, off]) in rows {
        if let Some(awaited) = on {
            stick(&model, true);
            assert_eq!(driver.enable(), Err(timed_out(awaited)));
            stick(&model, false);
        }
        // The same unit, mended.
        assert_eq!(driver.enable(), Ok(()), "{on:?}");
        driver.attach(G::DEVICE, G::DOMAIN, rig.root()).unwrap();
        rig.is_there(&model);
        if let Some(awaited) = off {
            stick(&model, true);
            assert_eq!(driver.disable(), Err(timed_out(awaited)));
            stick(&model, false);
            assert_eq!(driver.disable(), Ok(()));
        }
        G::received(&model);
    }
}

pub(crate) fn a_queue_that_is_not_emptied_fills_and_says_so<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.attached();
    rig.break_down(&model, Breakage::Deaf);
    // A command and a wait each.
    let (full, free) = (rig.room() / 2, rig.room() % 2);
    for _ in 0..full {
        let cause = failed(driver.invalidate_domain(G::DOMAIN));
        assert_eq!(cause, rig.timed_out());
    }
    let cause = failed(driver.invalidate_domain(G::DOMAIN));
    let needed = 2;
    assert_eq!(cause, UnitError::QueueFull { needed, free });
    // Late answers are no answers to the next flush, which gets its own.
    rig.break_down(&model, Breakage::None);
    driver.invalidate_domain(G::DOMAIN).unwrap();
    assert_eq!(G::received(&model).len() as u32, 2 * full + 2);
    // And around the end of the ring.
    for _ in 0..300 {
        driver.invalidate_domain(G::DOMAIN).unwrap();
    }
    assert_eq!(G::received(&model).len(), 600);
}

pub(crate) fn a_unit_that_stops_fails_one_flush_and_serves_the_next<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    for (stop, name) in rig.stops() {
        for (at, latency) in [(0, 0), (1, 0), (2, 0), (0, 5), (1, 5), (2, 5)] {
            let (driver, model) = rig.attached();
            let before = driver.counters();
            rig.slow(&model, latency);
            let nth = rig.stop(&model, Some((stop, at)));
            let mut flush = |what: &Invalidation| driver.invalidate(G::DOMAIN, what);
            let cause = failed(rig.two_pages(&mut flush));
            let UnitError::Command {
                error,
                command,
                record,
            } = cause
            else {
                panic!("{cause}");
            };
            assert!(error.starts_with(name), "{error}, not {name}");
            assert_eq!(rig.is_wait(command[0]), at == 2, "{cause}");
            rig.check_record(stop, nth, record);
            let received = G::received(&model);
            let pages = received
                .iter()
                .filter(|received| G::is_pages(received))
                .count();
            assert_eq!(pages as u32, at);
            rig.check_stopped(&received, &driver);
            rig.stop(&model, None);
            rig.two_pages(&mut flush).unwrap();
            assert_eq!(G::received(&model).len(), 3);
            let after = driver.counters();
            assert_eq!(after.batches - before.batches, 2);
            assert_eq!(after.commands - before.commands, 2, "of the second");
            assert_eq!(after.waits - before.waits, 1);
        }
    }
}

/// The first ticket follows the last, and not 0.
pub(crate) fn no_batch_waits_for_what_fresh_memory_holds<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.attached();
    {
        let mut inner = driver.inner.lock();
        let ring = <G::Kind as InMemory>::ring(&mut inner);
        ring.ticket = <<G::Kind as InMemory>::Queue as CommandQueue>::TICKET;
        if let Some(answers) = ring.layout.answers() {
            driver.memory().entries(answers, 1)[0].set(0);
        }
    }
    rig.break_down(&model, Breakage::Mute);
    let silent = failed(driver.invalidate_domain(G::DOMAIN));
    assert_eq!(silent, rig.timed_out());
    rig.break_down(&model, Breakage::None);
    driver.invalidate_domain(G::DOMAIN).unwrap();
    driver.detach(G::DEVICE).unwrap();
    G::received(&model);
}
