//! The order in which devices come and go.
//!
//! Nothing is sent to a unit before it is enabled; enabling brings what was attached. An attach gives translation
//! through one table or, with an error, none, and never through a mixture of two. Refusals change nothing: no command is
//! sent, no memory is taken, and what was there is there. A detach takes the entry away, then what was cached of it,
//! then what was translated through it, and waits; the domain's number may then be used for any other table. Tearing
//! down gives every page back.

use iopt::format::AmdV1;
use iopt::{Gather, Table};

use super::*;

pub(crate) fn before_it_is_enabled_nothing_is_sent_and_devices_are_there_afterwards<G: Rig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.unit();
    G::received(&model);
    let other = DeviceId(5);
    for device in [G::DEVICE, other] {
        driver.attach(device, G::DOMAIN, rig.root()).unwrap();
    }
    driver.detach(other).unwrap();
    driver.invalidate_domain(G::DOMAIN).unwrap();
    assert_eq!(G::received(&model), []);
    assert_eq!(driver.counters(), CommandCounters::default());
    crate::Driver::enable(&driver).unwrap();
    rig.is_there(&model);
    assert_eq!(rig.found(&model, other, None), None);
    assert_ne!(driver.counters(), CommandCounters::default());
    assert_eq!(crate::Driver::counters(&driver), driver.counters());
    let mut spans = Vec::new();
    driver.reserved(G::DEVICE, &mut |span| spans.push((span.start, span.last())));
    assert_eq!(spans, rig.reserved());
    G::received(&model);
    crate::Driver::disable(&driver).unwrap();
    assert_ne!(G::received(&model), []);
}

pub(crate) fn attaching_refuses_by_name_and_changes_nothing<G: Rig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.attached();
    let (device, domain, good) = (G::DEVICE, G::DOMAIN, rig.root());
    let other = SECOND;
    let refused = |device, domain, root| driver.attach(device, domain, root).unwrap_err();
    assert_eq!(
        refused(device, DomainId(8), good),
        UnitAttachError::AlreadyAttached { device, domain }
    );
    let asked = Root {
        address: good.address ^ 1 << 20,
        ..good
    };
    let there = good;
    assert_eq!(
        refused(other, domain, asked),
        UnitAttachError::OtherRoot {
            domain,
            there,
            asked
        }
    );
    let bits = driver.capabilities().domain_bits;
    if let Some(beyond) = 1u32.checked_shl(bits) {
        let domain = DomainId(beyond | 7);
        let expected = UnitAttachError::DomainId { domain, bits };
        assert_eq!(refused(other, domain, good), expected);
    }
    let deep = Root { levels: 7, ..good };
    assert!(matches!(
        refused(other, domain, deep),
        UnitAttachError::Levels { .. }
    ));
    let far = Root {
        address: 1 << 56,
        ..good
    };
    assert!(matches!(
        refused(other, domain, far),
        UnitAttachError::RootAddress { .. }
    ));
    let odd = Root {
        address: good.address | 0x800,
        ..good
    };
    assert!(matches!(
        refused(other, domain, odd),
        UnitAttachError::RootAddress { .. }
    ));
    let format = match good.format {
        FormatId::AmdV1 => FormatId::VtdSs,
        _ => FormatId::AmdV1,
    };
    let foreign = Root { format, ..good };
    assert_eq!(
        refused(other, domain, foreign),
        UnitAttachError::Format { format }
    );
    for (device, domain, root, error) in rig.refused() {
        assert_eq!(refused(device, domain, root), error);
        if matches!(
            error,
            UnitAttachError::Elsewhere { .. } | UnitAttachError::Beyond { .. }
        ) {
            assert_eq!(driver.detach(device), Err(error));
        }
    }
    let device = other;
    let gone = Err(UnitAttachError::NotAttached { device });
    assert_eq!(driver.detach(device), gone);
    assert_eq!(rig.found(&model, other, None), None);
    rig.is_there(&model);
    assert_eq!(G::received(&model), []);
}

pub(crate) fn a_root_that_a_domain_cannot_have_is_refused_and_the_old_one_stays<G: Rig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let there = rig.root();
    if there.format == FormatId::AmdV1 {
        // These grow, and their unit walks the new root (`amdvi/tests/flush.rs`).
        return;
    }
    let (driver, model) = rig.attached();
    // One of these plays the part.
    let tables = HeapTables::with_tables_at(64, 1 << 40).unwrap();
    let mut table = Table::new(AmdV1::new(3).unwrap(), &tables).unwrap();
    let mut gather = Gather::new();
    let asked = table.grow(4, &mut gather).unwrap();
    let domain = G::DOMAIN;
    let cause = UnitAttachError::OtherRoot {
        domain,
        there,
        asked,
    };
    let refused = gather.flush_with(|what| driver.invalidate(domain, what));
    assert_eq!(refused.err(), Some(FlushError::Root { domain, cause }));
    assert_eq!(G::received(&model), []);
    rig.is_there(&model);
    let _ = gather.never_walked();
}

pub(crate) fn a_device_is_found_when_attached_and_not_any_more_when_detached<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.enabled();
    let (device, domain) = (G::DEVICE, G::DOMAIN);
    let tag = rig.tag(device, domain);
    rig.watch(&model, &[None]);
    assert_eq!(rig.found(&model, device, None), None);
    let roots = [&[rig.root()][..], &rig.other_roots(), &[rig.root()]].concat();
    for (n, root) in roots.iter().enumerate() {
        driver.attach(device, domain, *root).unwrap();
        let received = G::received(&model);
        if n == 0 {
            assert_eq!(received, rig.attaching((domain, None), true));
        }
        assert_eq!(rig.found(&model, device, None), Some((tag, *root)));
        let beside = DeviceId(device.0 ^ 1);
        assert_eq!(rig.found(&model, beside, None), None);
        if n % 2 == 1 {
            // The second time the same is said.
            rig.break_down(&model, Breakage::Mute);
            driver.detach(device).unwrap_err();
            assert_eq!(rig.found(&model, device, None), None);
            rig.break_down(&model, Breakage::None);
            G::received(&model);
        }
        driver.detach(device).unwrap();
        let expected = rig.detaching(*root, (domain, None), true);
        let received = G::received(&model);
        assert_eq!(
            received[received.len() - expected.len()..],
            expected,
            "{root:?}"
        );
        assert!(
            n % 2 == 1 || received.len() == expected.len(),
            "{received:?}"
        );
        assert_eq!(rig.found(&model, device, None), None);
        let gone = Err(UnitAttachError::NotAttached { device });
        assert_eq!(driver.detach(device), gone);
    }
    for (_, seen) in rig.seen(&model) {
        let right = |(found, root)| found == tag && roots.contains(&root);
        assert!(seen.is_none_or(right), "{seen:?}");
    }
}

pub(crate) fn an_attach_that_is_not_answered_leaves_no_translation<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    if rig.attaching((G::DOMAIN, None), true).is_empty() {
        return;
    }
    for how in [Breakage::Mute, Breakage::Deaf] {
        let (driver, model) = rig.enabled();
        rig.break_down(&model, how);
        let failed = driver.attach(G::DEVICE, G::DOMAIN, rig.root());
        assert!(matches!(failed, Err(UnitAttachError::Unit { .. })));
        assert_eq!(rig.found(&model, G::DEVICE, None), None);
        rig.break_down(&model, Breakage::None);
        driver.detach(G::DEVICE).unwrap();
        driver.attach(G::DEVICE, G::DOMAIN, rig.root()).unwrap();
        rig.is_there(&model);
    }
}

pub(crate) fn without_memory_nothing_is_taken_and_nothing_is_attached<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (device, domain) = (G::DEVICE, G::DOMAIN);
    let mut refused = 0;
    for left in 0..64 {
        let memory = Arc::new(HeapTables::with_tables(64).unwrap());
        let taken = 64 - left;
        (0..taken).for_each(|_| assert!(memory.allocate(4096).is_ok()));
        let driver = match rig.over(memory.clone()) {
            Ok(driver) => driver,
            Err(error) => {
                assert!(std::format!("{error:?}").contains("NoTables"), "{error}");
                assert_eq!(memory.in_use(), taken);
                refused += 1;
                continue;
            }
        };
        driver.enable().unwrap();
        let model = driver.registers().clone();
        let attached = driver.attach(device, domain, rig.root());
        match attached {
            Ok(()) => rig.is_there(&model),
            Err(UnitAttachError::NoTables { device: named, .. }) => {
                assert_eq!(named, device);
                assert_eq!(rig.found(&model, device, None), None);
                let gone = Err(UnitAttachError::NotAttached { device });
                assert_eq!(driver.detach(device), gone);
            }
            Err(other) => panic!("{other}"),
        }
        G::received(&model);
        assert!(driver.tear_down().is_ok());
        assert_eq!(memory.in_use(), taken);
        if attached.is_ok() {
            break;
        }
    }
    assert!(refused > 2, "{refused}");
}

pub(crate) fn tearing_down_gives_every_page_back<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.attached();
    let memory = driver.memory().clone();
    for device in [0x0000, 0x00ff, 0x0100, 0x0200, 0x03ff] {
        let device = DeviceId(device);
        driver.attach(device, G::DOMAIN, rig.root()).unwrap();
    }
    assert!(memory.in_use() > 3);
    rig.break_down(&model, Breakage::Stuck);
    assert!(matches!(driver.disable(), Err(UnitError::TimedOut { .. })));
    rig.break_down(&model, Breakage::None);
    assert!(driver.tear_down().is_ok());
    assert_eq!(memory.in_use(), 0);
    G::received(&model);
}

/// The unit would take the address for another, or cannot reach it.
pub(crate) fn memory_beyond_the_units_addresses_is_refused_by_name<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, _) = rig.unit();
    let bits = driver.capabilities().output_bits;
    if bits > 52 {
        // There is no such memory to test with, and the structures have no such words.
        return;
    }
    let high = Arc::new(HeapTables::with_tables_at(64, 1 << bits).unwrap());
    let refused = rig.over(high.clone()).err().map(|error| error.to_string());
    let last = high.last_address();
    let text =
        std::format!("memory up to {last:#x} lies beyond the unit's addresses of {bits} bits");
    assert_eq!(refused, Some(text));
    assert_eq!(high.in_use(), 0);
}
