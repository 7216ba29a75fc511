//! A NIC's port: whether its link is up, and where it is.

use std::io;
use std::sync::Arc;

use super::advice::{Operation, advise};
use super::gid::{self, Gid, GidRow};
use super::queue_pair::Local;
use super::raw::{AsyncEvent, Context, PortNow};
use super::settings::VerbsSettings;
use super::wire::Place;
use crate::hw::LinkState;

/// A port as it was last asked.
pub(super) struct Port {
    context: Arc<Context>,
    settings: VerbsSettings,
    now: PortNow,
    gid: GidRow,
}

/// What the device told since the last time.
#[derive(Default)]
pub(super) struct News {
    /// The link changed.
    pub link: Option<LinkState>,
    /// The port has another address.
    pub moved: bool,
    /// Queue pairs that will receive no more.
    pub last_receives: Vec<u32>,
    /// Queue pairs that failed by themselves.
    pub failed: Vec<u32>,
    /// The device is gone.
    pub fatal: bool,
}

fn choose(context: &Context, settings: &VerbsSettings, now: &PortNow) -> io::Result<GidRow> {
    let rows = context.gids(settings.port).map_err(|e| advise(Operation::QueryPort, e))?;
    gid::choose(&rows, now.ethernet, settings.gid_index).map_err(io::Error::other)
}

impl Port {
    /// A port must be up to begin with: its address is known only then.
    pub fn open(context: &Arc<Context>, settings: &VerbsSettings) -> io::Result<Self> {
        let now = context.port(settings.port).map_err(|e| advise(Operation::QueryPort, e))?;
        if !now.up {
            return Err(io::Error::other(format!(
                "port {} is down: bring its link up (rdma link, ip link set DEVICE up), or describe the NIC as down (0 Gbit/s)",
                settings.port
            )));
        }
        let gid = choose(context, settings, &now)?;
        Ok(Self { context: Arc::clone(context), settings: settings.clone(), now, gid })
    }

    pub fn settings(&self) -> &VerbsSettings {
        &self.settings
    }

    pub fn is_up(&self) -> bool {
        self.now.up
    }

    /// Where it is.
    pub fn place(&self) -> Place {
        let gid = if self.now.ethernet { self.gid.gid } else { Gid::default() };
        Place { gid, lid: self.now.lid, mtu: self.now.mtu as u8 }
    }

    /// How a queue pair of a traffic class is connected.
    pub fn local(&self, traffic_class: u8) -> Local<'_> {
        Local {
            settings: &self.settings,
            gid_index: self.gid.index,
            ethernet: self.now.ethernet,
            mtu: self.now.mtu,
            traffic_class,
        }
    }

    /// Reads what the device has told. Never blocks.
    pub fn news(&mut self) -> News {
        let mut news = News::default();
        while let Some(event) = self.context.next_event() {
            match event {
                AsyncEvent::Port => self.ask_again(&mut news),
                AsyncEvent::LastReceive(number) => news.last_receives.push(number),
                AsyncEvent::QueuePairFailed(number) => news.failed.push(number),
                AsyncEvent::Fatal => news.fatal = true,
                AsyncEvent::Other => {}
            }
        }
        news
    }

    fn ask_again(&mut self, news: &mut News) {
        let (was_up, before) = (self.now.up, self.place());
        // A port that cannot be asked carries nothing.
        match self.context.port(self.settings.port) {
            Ok(now) => self.now = now,
            Err(_) => self.now.up = false,
        }
        if let (true, Ok(gid)) = (self.now.up, choose(&self.context, &self.settings, &self.now)) {
            self.gid = gid;
        }
        if was_up != self.now.up {
            news.link = Some(if self.now.up { LinkState::Up } else { LinkState::Down });
        }
        news.moved |= self.place() != before;
    }
}
