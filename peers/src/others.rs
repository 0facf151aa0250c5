//! Who stands beside us: the one place where their modules are named.

use crate::field::{Contest, Entrant, Who};
use crate::{by_hand, crates, limit};

/// Everybody but us who does the format of this contest. The loops that are the machine's limit stand
/// beside every format (where it has the same sizes), foreign crates and the walk by hand beside the
/// reference only.
pub(crate) fn beside(contest: &Contest) -> anyhow::Result<Vec<Entrant>> {
    let mut all: Vec<Entrant> = Vec::new();
    for subject in limit::subjects() {
        let who = match subject.name().as_str() {
            "stores" => Who::Limit,
            "stores, checked" => Who::CheckedLimit,
            _ => Who::VectorLimit,
        };
        all.push((who, subject));
    }
    if contest.reference {
        all.extend(
            by_hand::subjects()
                .into_iter()
                .map(|subject| (Who::ByHand, subject)),
        );
        all.extend(
            crates::subjects()
                .into_iter()
                .map(|subject| (Who::Crate, subject)),
        );
    }
    Ok(all)
}
