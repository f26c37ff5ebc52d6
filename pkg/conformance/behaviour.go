package conformance

import (
	"fmt"
	"slices"
	"strings"
)

// Profile is what a behaviour is for.
type Profile string

const (
	// ProfileReader is of behaviours that show with any identity that may read. Nothing is changed.
	ProfileReader Profile = "reader"
	// ProfileClaimer is of behaviours that show with claims of the holder karpenter, on node groups that make machines by themselves.
	ProfileClaimer Profile = "claimer"
	// ProfileAutoscaler is of behaviours that show with claims of an autoscaler beside those of karpenter.
	ProfileAutoscaler Profile = "autoscaler"
	// ProfileFault is of behaviours that need a control over the target: a Cluster of their own, node groups as they describe them, and machines that
	// wait, fail and vanish when they say so.
	ProfileFault Profile = "fault"
)

// Profiles returns every profile.
func Profiles() []Profile {
	return []Profile{ProfileReader, ProfileClaimer, ProfileAutoscaler, ProfileFault}
}

// Caller is an identity that a behaviour needs besides one that may do what its profile says.
type Caller string

const (
	// CallerCluster is that the client has the Cluster's own identity, and not merely one that may claim for it.
	CallerCluster Caller = "cluster"
	// CallerAutoscaler has the role autoscaler.
	CallerAutoscaler Caller = "autoscaler"
	// CallerAdmin has the role admin.
	CallerAdmin Caller = "admin"
	// CallerStranger has the identity of a Cluster that does not exist.
	CallerStranger Caller = "stranger"
)

// Behaviour is one thing that the contract promises, and that a case of the suite checks.
type Behaviour struct {
	// ID names it for ever: an id is neither changed nor given to another behaviour, and none is removed.
	ID string
	// Area is the part of the API that it is about, and Sentence what it is, within the area.
	Area, Sentence string
	// Profile is what it is for.
	Profile Profile
	// NodeGroups is how many node groups it needs, without a control. Callers are the identities that it needs.
	NodeGroups int
	Callers    []Caller
}

// Behaviours returns every behaviour, in the order in which they are checked.
func Behaviours() []Behaviour {
	var all []Behaviour
	for _, area := range areas {
		for _, c := range area.cases {
			all = append(all, c.behaviour(area.name))
		}
	}
	return all
}

// areas are the parts of the API.
var areas = []struct {
	name  string
	cases []testCase
}{
	{"NodeGroups", slices.Concat(nodeGroupReadingCases, nodeGroupCases)},
	{"Claims", slices.Concat(claimReadingCases, claimCases)},
	{"Release", releaseCases},
	{"Adopt", adoptCases},
	{"Listing", listingCases},
	{"SyncClaims", syncCases},
	{"Holders", holderCases},
	{"Machines", slices.Concat(machineReadingCases, machineCases)},
	{"Requests", requestCases},
	{"Server", slices.Concat(serverReadingCases, serverCases)},
}

// testCase checks one behaviour.
type testCase struct {
	id    string
	terms terms
	name  string
	run   func(*suite)
}

func (c testCase) behaviour(area string) Behaviour {
	return Behaviour{
		ID: c.id, Area: area, Sentence: c.name, Profile: c.terms.profile, NodeGroups: c.terms.groups, Callers: slices.Clone(c.terms.callers),
	}
}

// terms are what a case needs.
type terms struct {
	profile Profile
	groups  int
	callers []Caller
}

// fault is a case that needs a control, with which there is everything.
func fault() terms { return terms{profile: ProfileFault} }

func reader(groups int, callers ...Caller) terms {
	return terms{profile: ProfileReader, groups: groups, callers: callers}
}

func claimer(groups int) terms { return terms{profile: ProfileClaimer, groups: groups} }

// autoscaler is a case with a node group.
func autoscaler(callers ...Caller) terms {
	return terms{profile: ProfileAutoscaler, groups: 1, callers: append([]Caller{CallerAutoscaler}, callers...)}
}

// Table returns the behaviours as a table in Markdown.
func Table() string {
	var table strings.Builder
	table.WriteString("| id | profile | needs | area | behaviour |\n|---|---|---|---|---|\n")
	for _, b := range Behaviours() {
		fmt.Fprintf(&table, "| `%s` | %s | %s | %s | %s |\n", b.ID, b.Profile, b.needs(), b.Area, b.Sentence)
	}
	return table.String()
}

// needs says in a few words what a behaviour needs.
func (b Behaviour) needs() string {
	if b.Profile == ProfileFault {
		return "a control"
	}
	var needs []string
	switch b.NodeGroups {
	case 0:
	case 1:
		needs = append(needs, "a node group")
	default:
		needs = append(needs, "two node groups")
	}
	for _, caller := range b.Callers {
		needs = append(needs, string(caller))
	}
	return strings.Join(needs, ", ")
}
