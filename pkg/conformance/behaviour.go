package conformance

import (
	"fmt"
	"slices"
	"strings"
)

// Profile is a group of behaviours with the same requirements.
type Profile string

const (
	// ProfileReader contains behaviours that any identity with read access can check. They change
	// nothing.
	ProfileReader Profile = "reader"
	// ProfileClaimer contains behaviours that are checked with claims of the holder karpenter, on
	// node groups that create machines without a control.
	ProfileClaimer Profile = "claimer"
	// ProfileAutoscaler contains behaviours that are checked with claims of an autoscaler, in
	// addition to those of karpenter.
	ProfileAutoscaler Profile = "autoscaler"
	// ProfileFault contains behaviours that need a control over the target: their own Cluster, node
	// groups as they describe them, and machines that wait, fail and vanish on command.
	ProfileFault Profile = "fault"
)

// Profiles returns every profile.
func Profiles() []Profile {
	return []Profile{ProfileReader, ProfileClaimer, ProfileAutoscaler, ProfileFault}
}

// Caller is an identity that a behaviour needs in addition to that of its profile.
type Caller string

const (
	// CallerCluster means that the client has the Cluster's own identity. A role that may claim for
	// the Cluster is not enough.
	CallerCluster Caller = "cluster"
	// CallerAutoscaler has the role autoscaler.
	CallerAutoscaler Caller = "autoscaler"
	// CallerAdmin has the role admin.
	CallerAdmin Caller = "admin"
	// CallerStranger has the identity of a Cluster that does not exist.
	CallerStranger Caller = "stranger"
)

// Behaviour is a single promise of the contract. A case of the suite checks it.
type Behaviour struct {
	// ID identifies the behaviour permanently. An ID is never changed, removed, or assigned to
	// another behaviour.
	ID string
	// Area is the part of the API that the behaviour belongs to. Sentence describes the behaviour
	// within the area.
	Area, Sentence string
	// Profile is the profile that the behaviour belongs to.
	Profile Profile
	// NodeGroups is the number of node groups that the behaviour needs without a control. Callers
	// are the identities that it needs.
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
	{"Clusters", clusterCases},
	{"NodePools", slices.Concat(nodePoolCases, publishingCases)},
	{"Autoscaler", autoscalerCases},
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

// terms are the requirements of a case.
type terms struct {
	profile Profile
	groups  int
	callers []Caller
}

// fault returns the terms of a case that needs a control. A control provides everything else.
func fault() terms { return terms{profile: ProfileFault} }

func reader(groups int, callers ...Caller) terms {
	return terms{profile: ProfileReader, groups: groups, callers: callers}
}

func claimer(groups int) terms { return terms{profile: ProfileClaimer, groups: groups} }

// autoscaler returns the terms of a case with a node group.
func autoscaler(callers ...Caller) terms {
	return terms{profile: ProfileAutoscaler, groups: 1, callers: append([]Caller{CallerAutoscaler}, callers...)}
}

// autoscalerAlone returns the terms of a case without a node group.
func autoscalerAlone() terms {
	return terms{profile: ProfileAutoscaler, callers: []Caller{CallerAutoscaler}}
}

// Table returns the behaviours as a Markdown table.
func Table() string {
	var table strings.Builder
	table.WriteString("| id | profile | needs | area | behaviour |\n|---|---|---|---|---|\n")
	for _, b := range Behaviours() {
		fmt.Fprintf(&table, "| `%s` | %s | %s | %s | %s |\n", b.ID, b.Profile, b.needs(), b.Area, b.Sentence)
	}
	return table.String()
}

// needs describes the requirements of a behaviour in a few words.
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
