package badlink

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Port is the port of every address of a link.
const Port = 7443

// Devices, in the namespace between. Here they have the prefix.
const (
	near   = "near"
	far    = "far"
	behind = "delay"

	prefix = "badlink-"
)

// Addresses.
var (
	nearHere    = netip.MustParsePrefix("10.77.1.1/24")
	nearBetween = netip.MustParsePrefix("10.77.1.2/24")
	farHere     = netip.MustParsePrefix("10.77.2.1/24")
	farBetween  = netip.MustParsePrefix("10.77.2.2/24")
	// servers are the link's addresses, clients the one that servers see all clients come from.
	servers = netip.MustParsePrefix("10.77.3.0/24")
	clients = netip.MustParsePrefix("10.77.4.0/24")
)

// Conditions are what a link is like. The zero value is a good one.
type Conditions struct {
	// RTT is how long a packet and its answer take together.
	RTT time.Duration
	// Loss is how many of a hundred packets are lost, in each direction.
	Loss float64
	// Rate is how many bits a second pass, in each direction. Zero for any number.
	Rate uint64
	// Mute loses all that clients send, Deaf all that servers send.
	Mute, Deaf bool
}

// Down are the conditions of a link that nothing passes.
var Down = Conditions{Mute: true, Deaf: true}

// Link is a network between this machine and itself. There is one at a time. Its methods are safe for concurrent use.
type Link struct {
	between netns.NsHandle
	routes  *netlink.Handle // of the namespace between
	delay   *delay

	mu         sync.Mutex
	conditions Conditions
	ports      []uint16            // of the servers, in the order of their addresses
	lost       map[netip.Addr]bool // addresses that nothing reaches any more
	generation uint32              // of connections, from one; earlier ones are forgotten
	dropped    uint64              // packets that rules have dropped that are no more
}

// New makes a good link. The program must be [Apart].
func New() (*Link, error) {
	l := &Link{between: netns.None(), lost: map[netip.Addr]bool{}, generation: 1}
	if err := l.make(); err != nil {
		return nil, errors.Join(fmt.Errorf("making a link: %w", err), l.Close())
	}
	return l, nil
}

func (l *Link) make() error {
	if err := l.makeBetween(); err != nil {
		return err
	}
	var err error
	if l.routes, err = netlink.NewHandleAt(l.between); err != nil {
		return err
	}
	here, err := netlink.NewHandle()
	if err != nil {
		return err
	}
	defer here.Close()
	for _, pair := range []struct {
		name          string
		here, between netip.Prefix
	}{{near, nearHere, nearBetween}, {far, farHere, farBetween}} {
		veth := netlink.NewVeth(netlink.LinkAttrs{Name: prefix + pair.name, MTU: mtu})
		veth.PeerName, veth.PeerNamespace, veth.PeerMTU = pair.name, netlink.NsFd(l.between), mtu
		if err := here.LinkAdd(veth); err != nil {
			return fmt.Errorf("making a veth pair: %w", err)
		}
		if err := errors.Join(bringUp(here, prefix+pair.name, pair.here), bringUp(l.routes, pair.name, pair.between)); err != nil {
			return err
		}
	}
	if err := bringUp(l.routes, behind, netip.Prefix{}); err != nil {
		return err
	}
	// Requests leave by near and arrive by far; answers go the other way.
	err = errors.Join(
		route(here, prefix+near, servers, nearBetween.Addr()), route(here, prefix+far, clients, farBetween.Addr()),
		route(l.routes, far, servers, farHere.Addr()), route(l.routes, near, clients, nearHere.Addr()),
		l.detour(),
		// An answer comes from 127.0.0.1 before it is translated.
		setting("ipv4/conf/"+prefix+far+"/route_localnet", "1"),
	)
	if err != nil {
		return err
	}
	if err := l.translate(); err != nil { // which has the kernel load what it needs for it
		return err
	}
	// A connection whose packets were lost is still one.
	if err := setting("netfilter/nf_conntrack_tcp_be_liberal", "1"); err != nil {
		return err
	}
	// There has to be a chain whose packets are counted when it is replaced.
	if err := replaceRules(int(l.between), chain{name: dropping}); err != nil {
		return err
	}
	return l.restrict()
}

// makeBetween makes the namespace and its delay: the calling thread enters it and comes back.
func (l *Link) makeBetween() (err error) {
	runtime.LockOSThread()
	here, err := netns.Get()
	if err != nil {
		return err
	}
	defer func() {
		back := netns.Set(here)
		if back == nil {
			runtime.UnlockOSThread() // else no other goroutine may have this thread
		}
		err = errors.Join(err, back, here.Close())
	}()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("making a network namespace: %w", err)
	}
	if l.between, err = netns.Get(); err != nil {
		return err
	}
	if l.delay, err = newDelay(behind); err != nil {
		return err
	}
	return errors.Join(
		setting("ipv4/ip_forward", "1"),
		// Packets come back from the delay by a device that is not on the way to their source.
		setting("ipv4/conf/all/rp_filter", "0"), setting("ipv4/conf/default/rp_filter", "0"), setting("ipv4/conf/"+behind+"/rp_filter", "0"),
	)
}

// setting writes a setting of the calling thread's network namespace.
func setting(name, value string) error {
	return os.WriteFile(filepath.Join("/proc/sys/net", name), []byte(value), 0) // it is there, or it is an error
}

func bringUp(in *netlink.Handle, device string, address netip.Prefix) error {
	d, err := in.LinkByName(device)
	if err != nil {
		return fmt.Errorf("device %s: %w", device, err)
	}
	if address.IsValid() {
		if err := in.AddrAdd(d, &netlink.Addr{IPNet: ipNet(address)}); err != nil {
			return fmt.Errorf("address %s: %w", address, err)
		}
	}
	if err := in.LinkSetUp(d); err != nil {
		return fmt.Errorf("device %s: %w", device, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func route(in *netlink.Handle, device string, to netip.Prefix, via netip.Addr) error {
	d, err := in.LinkByName(device)
	if err != nil {
		return fmt.Errorf("device %s: %w", device, err)
	}
	if err := in.RouteAdd(&netlink.Route{LinkIndex: d.Attrs().Index, Dst: ipNet(to), Gw: via.AsSlice()}); err != nil {
		return fmt.Errorf("route to %s: %w", to, err)
	}
	return nil
}

// detour sends what arrives between through the delay first.
func (l *Link) detour() error {
	const table, priority = 100, 100
	d, err := l.routes.LinkByName(behind)
	if err != nil {
		return fmt.Errorf("device %s: %w", behind, err)
	}
	if err := l.routes.RouteAdd(&netlink.Route{
		LinkIndex: d.Attrs().Index, Table: table, Dst: ipNet(netip.MustParsePrefix("0.0.0.0/0")), Scope: netlink.SCOPE_LINK,
	}); err != nil {
		return fmt.Errorf("route to the delay: %w", err)
	}
	for _, device := range []string{near, far} {
		rule := netlink.NewRule()
		rule.IifName, rule.Table, rule.Priority = device, table, priority
		if err := l.routes.RuleAdd(rule); err != nil {
			return fmt.Errorf("rule for the delay: %w", err)
		}
	}
	return nil
}

// Close removes the link. What is connected by it hangs.
func (l *Link) Close() error {
	var errs []error
	if l.delay != nil {
		errs = append(errs, l.delay.close())
	}
	if l.routes != nil {
		// The devices' other ends go with them, the rest with the namespace.
		for _, device := range []string{near, far} {
			if d, err := l.routes.LinkByName(device); err == nil {
				errs = append(errs, l.routes.LinkDel(d))
			}
		}
		l.routes.Close()
	}
	if l.between.IsOpen() {
		errs = append(errs, l.between.Close())
		errs = append(errs, replaceRules(0))
	}
	return errors.Join(errs...)
}

// Serve returns the address that, with [Port], leads by the link to a port of 127.0.0.1. Two calls return two addresses.
func (l *Link) Serve(port uint16) (netip.Addr, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ports = append(l.ports, port)
	return addressOf(len(l.ports) - 1), l.translate()
}

func addressOf(server int) netip.Addr {
	address := servers.Addr().As4()
	address[3] = byte(server + 1)
	return netip.AddrFrom4(address)
}

// Set changes what the link is like. Packets that are under way are not touched.
func (l *Link) Set(c Conditions) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conditions = c
	return l.restrict()
}

// Forget loses all further packets of the connections that there are, as a gateway does that has lost its table. Neither end is told.
func (l *Link) Forget() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.generation++
	return l.restrict()
}

// Lose has nothing reach an address any more, nor come from there.
func (l *Link) Lose(address netip.Addr) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lost[address] = true
	return l.restrict()
}

// translate makes the translations of addresses here. It is called with the lock held.
func (l *Link) translate() error {
	requests := chain{name: "requests", kind: nftables.ChainTypeNAT, hook: nftables.ChainHookPrerouting, priority: nftables.ChainPriorityNATDest}
	for i, port := range l.ports {
		requests.rules = append(requests.rules, when(arrivesBy(prefix+far), isTo(addressOf(i)), isToPort(Port)).
			then(sendTo(netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port))...))
	}
	sources := chain{
		name: "sources", kind: nftables.ChainTypeNAT, hook: nftables.ChainHookPostrouting, priority: nftables.ChainPriorityNATSource,
		rules: []rule{when(leavesBy(prefix + near)).then(comeFrom(clients.Addr().Next())...)},
	}
	if err := replaceRules(0, requests, sources); err != nil {
		return fmt.Errorf("translating addresses: %w", err)
	}
	return nil
}

// restrict makes the link what it is to be like. It is called with the lock held.
func (l *Link) restrict() error {
	c := l.conditions
	var err error
	if l.dropped, err = l.lostSoFar(); err != nil { // what the present rules have counted goes with them
		return err
	}
	l.delay.set(c.RTT / 2)
	forgotten := chain{
		name: "generation", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookPrerouting, priority: nftables.ChainPriorityMangle,
		rules: []rule{when(isMarked(0)).then(markWith(l.generation)...)},
	}
	drops := chain{name: dropping, kind: nftables.ChainTypeFilter, hook: nftables.ChainHookForward, priority: nftables.ChainPriorityFilter}
	add := func(r rule) { drops.rules = append(drops.rules, r.countAndDrop()) }
	for mark := uint32(1); mark < l.generation; mark++ {
		add(when(isMarked(mark)))
	}
	for address := range l.lost {
		add(when(isTo(address)))
		add(when(isFrom(address)))
	}
	for _, direction := range []struct {
		by     string
		closed bool
	}{{far, c.Mute}, {near, c.Deaf}} {
		if direction.closed {
			add(when(arrivesBy(behind), leavesBy(direction.by)))
		}
		if c.Loss > 0 {
			add(when(arrivesBy(behind), leavesBy(direction.by), byChance(c.Loss)))
		}
	}
	if err := replaceRules(int(l.between), forgotten, drops); err != nil {
		return fmt.Errorf("dropping packets: %w", err)
	}
	return errors.Join(l.limit(near), l.limit(far))
}

// dropping is the chain of the rules that drop packets.
const dropping = "drops"

// Lost is how many packets have been dropped since the link was made, by chance or because nothing was to pass. Those that found a queue full are not
// counted.
func (l *Link) Lost() (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	lost, err := l.lostSoFar()
	return int(lost), err
}

// lostSoFar is called with the lock held.
func (l *Link) lostSoFar() (uint64, error) {
	more, err := counted(int(l.between), dropping)
	return l.dropped + more, err
}

// limit is called with the lock held.
func (l *Link) limit(device string) error {
	const (
		// burst is what may pass at once after a silence, in bytes, and queue how long packets wait for their turn before they are lost.
		burst = 4 * mtu
		queue = 400 * time.Millisecond
	)
	d, err := l.routes.LinkByName(device)
	if err != nil {
		return fmt.Errorf("device %s: %w", device, err)
	}
	present, err := l.routes.QdiscList(d)
	if err != nil {
		return fmt.Errorf("limiting the rate of %s: %w", device, err)
	}
	for _, q := range present {
		if _, limited := q.(*netlink.Tbf); !limited {
			continue
		}
		if err := l.routes.QdiscDel(q); err != nil {
			return fmt.Errorf("lifting the limit of %s: %w", device, err)
		}
	}
	if l.conditions.Rate == 0 {
		return nil
	}
	bytes := l.conditions.Rate / 8
	err = l.routes.QdiscAdd(&netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: d.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		Rate:       bytes, Buffer: netlink.Xmittime(bytes, burst), Limit: burst + uint32(float64(bytes)*queue.Seconds()),
	})
	if err != nil {
		return fmt.Errorf("limiting the rate of %s: %w", device, err)
	}
	return nil
}
