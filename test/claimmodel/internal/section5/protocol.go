package section5

import (
	"fmt"
	"strings"

	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/explore"
)

// Protocol is one variant of the protocol in one world.
type Protocol struct {
	Claims      int // at most 2
	Floor       int
	StaleAgents int // 0 to 2, beside one that always reads live
	Outsiders   int // deletions of claimed Machines by others
	Raises      int // of replicas, by humans

	Rules Rules
	// Heal raises replicas when the accounting is negative, instead of counting that as a violation.
	Heal bool

	// Controls: each must bring a violation.
	NoFence, Early, NoSeq bool
}

// Rules are what the first wording lacked. Each name stands for the rule that it adds.
type Rules struct {
	Enter   bool // the ledger first, then claims and Machines, then the write that tests that ledger
	Name    bool // Machines after the ledger that the write tests
	Label   bool // the Machine first, then the ledger, then the patch with that Machine's resourceVersion
	Drop    bool
	Account bool // Machines after the ledger
	Release bool // Machines after the ledger
	Absent  bool // not in the cache is not gone
	Hand    bool
	End     bool // before "released": claim, ledger, Machines, in that order
	UnName  bool
	NameMC  bool
	Report  bool
	MCFirst bool // Bound before the label
}

// AllRules has every rule.
func AllRules() Rules {
	return Rules{true, true, true, true, true, true, true, true, true, true, true, true, true}
}

// Actions.
const (
	createClaim = iota + 1
	releaseClaim
	outsiderDeletes
	humanRaises
	deploymentScales
	setObserves
	setSees
	nodeJoins
	tornDown
	setCreates
	setDeletes
	readLedger
	readMachines
	readClaims
	enter
	name
	cancel
	unName
	cancelNamed
	dropLost
	drop
	release
	label
	bind
	endLost
	endReleased
	unbind
	account
	accountRaise
	accountFold
	accountNegative
	releaseSpare
	finalize
	deleteMachine
	lower
	forget
	letGo
	dropRelease
)

var wording = map[explore.Act]string{
	createClaim: "CreateClaim c%d", releaseClaim: "ReleaseClaim c%d", outsiderDeletes: "somebody deletes m%d",
	humanRaises: "a human raises replicas", deploymentScales: "MachineDeployment: MachineSet.spec.replicas=%d",
	setObserves: "MachineSet: observes replicas=%d", setSees: "MachineSet: sees m%d", nodeJoins: "m%d has a Node",
	tornDown: "m%d is torn down", setCreates: "MachineSet: creates m%d", setDeletes: "MachineSet: DELETES m%d",
	readLedger: "read the ledger", readMachines: "read Machines", readClaims: "read claims",
	enter: "enter c%d", name: "name for c%d: m%d", cancel: "cancel c%d, spare", unName: "un-name for c%d: m%d",
	cancelNamed: "cancel c%d, named m%d, spare", dropLost: "drop c%d, lost m%d", drop: "drop c%d",
	release: "release for c%d: m%d", label: "label c%d: m%d", bind: "claim c%d Bound: m%d", endLost: "claim c%d Ended (lost)",
	endReleased: "claim c%d Ended (released)", unbind: "unbind from c%d: m%d", account: "account, spare=%d",
	accountRaise: "account, raise by %d", accountFold: "account, fold", accountNegative: "account",
	releaseSpare: "release spare m%d", finalize: "finalizer on m%d", deleteMachine: "DELETE m%d",
	lower: "lower replicas for m%d", forget: "forget m%d, gone and not lowered", letGo: "finalizer off m%d", dropRelease: "drop release of m%d",
}

const (
	liveAgent = 2
	nobody    = 3
)

func act(who, what, x, y int) explore.Act {
	return explore.Act(who<<24 | what<<16 | (x+1)<<8 | (y + 1))
}

// Describe says an action in words.
func (p *Protocol) Describe(a explore.Act) string {
	who := [...]string{"agent 0: ", "agent 1: ", "live agent: ", ""}[a>>24]
	text := wording[a>>16&255]
	values := []any{int(a>>8&255) - 1, int(a&255) - 1}
	n := 0
	for _, r := range text {
		if r == '%' {
			n++
		}
	}
	return who + fmt.Sprintf(text, values[:n]...)
}

// ParseRules returns all rules but the named ones, separated by commas.
func ParseRules(without string) (Rules, error) {
	r := AllRules()
	fields := map[string]*bool{
		"enter": &r.Enter, "name": &r.Name, "label": &r.Label, "drop": &r.Drop, "account": &r.Account, "release": &r.Release,
		"absent": &r.Absent, "hand": &r.Hand, "end": &r.End, "unname": &r.UnName, "nameMC": &r.NameMC, "report": &r.Report,
		"mcfirst": &r.MCFirst,
	}
	for rule := range strings.SplitSeq(without, ",") {
		switch field, known := fields[rule]; {
		case rule == "":
		case rule == "all":
			r = Rules{}
		case known:
			*field = false
		default:
			return Rules{}, fmt.Errorf("no rule %q", rule)
		}
	}
	return r, nil
}
