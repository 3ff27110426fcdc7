//! The running proxy, from its configuration to its end. [`run`] reads from top to bottom:
//!
//! 1. [`settings`]: everything that is said is read and checked, and the mode is chosen. Nothing is touched before.
//! 2. [`proxy`] starts the tasks: the servers answer, the [`source`] lists, the [`dataplane_thread`] loads its programs.
//! 3. [`set_up`]: the node is set up, in kube-proxy's order.
//! 4. Everything listed is written, and changes are followed. What another kube-proxy has left goes
//!    ([`leftover_removal`]); [`record`] tells `status` about it all.
//! 5. The end: a signal, a change of the [`own_node`] or of the configuration ([`reload`]) that takes a new process, or
//!    a failure. What is programmed goes on working.

mod checks;
mod config_changes;
mod dataplane_thread;
mod event;
mod filling_tables;
mod kernel;
mod leftover_removal;
mod mode_choice;
mod own_node;
mod proxy;
pub mod record;
mod reload;
mod run;
mod set_up;
mod settings;
mod source;
mod unattached_interfaces;
mod unsupported_services;

pub use self::{record::Record, run::run, settings::Settings};
