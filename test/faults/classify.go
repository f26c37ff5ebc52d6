package faults

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/samber/lo"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// Class is a kind of write of the claim protocol.
type Class string

// The classes, in the order in which a claim encounters them.
const (
	ClaimCreated      Class = "claim created"
	ClaimMoved        Class = "claim moved to its next candidate"
	LedgerBegun       Class = "ledger begun or rebuilt"
	ReplicasRaised    Class = "replicas raised, claims admitted"
	SpareEntered      Class = "claims admitted without a raise"
	AdoptEntered      Class = "claim entered for an existing Machine"
	ClaimEntered      Class = "claim marked as admitted"
	ClaimExplained    Class = "claim's wait explained"
	MachineNamed      Class = "Machine named in the ledger"
	ClaimBound        Class = "claim Bound"
	MachineLabelled   Class = "Machine labelled"
	LedgerTidied      Class = "entries dropped from the ledger"
	NodeNoted         Class = "Node noted on the claim"
	ClaimReleasing    Class = "claim Releasing"
	ClaimFailed       Class = "claim failed"
	ReleaseBegun      Class = "release noted in the ledger"
	MachineHeld       Class = "finalizer and annotations put on the Machine"
	MachineDeleted    Class = "Machine deleted"
	ReplicasLowered   Class = "replicas lowered"
	PausePut          Class = "MachineDeployment paused"
	SetLowered        Class = "MachineSet lowered"
	PauseRemoved      Class = "MachineDeployment lowered and unpaused"
	FinalizerRemoved  Class = "finalizer taken off"
	MachineUnlabelled Class = "label taken off for a hand-over"
	ClaimEnded        Class = "claim Ended"
	SetPaused         Class = "MachineSet paused"
	SetUnpaused       Class = "MachineSet unpaused"
	ClaimRemade       Class = "lost claim made again"
	ClaimRestored     Class = "lost status restored"
	TombstoneCreated  Class = "tombstone created"
	TombstoneEngraved Class = "tombstone's status written"
	ClaimForgotten    Class = "claim forgotten"
	FloorChosen       Class = "Machine of the floor chosen in the ledger"
	FloorMarked       Class = "Machine marked as the floor's"
	ReturnRequested   Class = "return of the Machine requested"
	FloorRaised       Class = "floor raised for a returned Machine"
	MachineReturned   Class = "label taken off a returned Machine"

	// Ignored writes are not part of the protocol: events, access reviews, and what is published
	// about spokes.
	Ignored Class = "ignored"
	// Unknown writes are not known to the proxy.
	Unknown Class = "unknown"
)

// Classes lists all steps of the protocol.
var Classes = []Class{
	ClaimCreated, ClaimMoved, LedgerBegun, ReplicasRaised, SpareEntered, AdoptEntered, ClaimEntered, ClaimExplained, MachineNamed,
	ClaimBound, MachineLabelled, LedgerTidied, NodeNoted, ClaimReleasing, ClaimFailed, ReleaseBegun, MachineHeld, MachineDeleted,
	ReplicasLowered, PausePut, SetLowered, PauseRemoved, FinalizerRemoved, MachineUnlabelled, ClaimEnded, SetPaused, SetUnpaused,
	ClaimRemade, ClaimRestored, TombstoneCreated, TombstoneEngraved, ClaimForgotten, FloorChosen, FloorMarked,
	ReturnRequested, FloorRaised, MachineReturned,
}

// Memory is the state that classification needs in addition to the write itself. The proxies of all
// agents share it. The zero value is ready to use.
type Memory struct {
	mu     sync.Mutex
	lost   map[string]bool // MachineClaims whose object was destroyed, by namespace/name
	adopts map[string]bool // ids of claims that adopt a Machine
}

// Lose records that a MachineClaim is being destroyed, so that its next creation counts as a
// recreation.
func (m *Memory) Lose(namespace, name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.lost == nil {
		m.lost = map[string]bool{}
	}
	m.lost[namespace+"/"+name] = true
}

func (m *Memory) wasLost(namespace, name string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.lost[namespace+"/"+name]
}

func (m *Memory) adopt(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.adopts == nil {
		m.adopts = map[string]bool{}
	}
	m.adopts[id] = true
}

func (m *Memory) isAdoption(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.adopts[id]
}

// Classify returns the step of the protocol that a write is, or [Unknown] and the reason. It
// returns "" for requests that change nothing.
func (m *Memory) Classify(r *Request) (Class, error) {
	if !r.Write() {
		return "", nil
	}
	var class Class
	var err error
	switch {
	case r.Resource == "events", r.Resource == "selfsubjectaccessreviews", r.Resource == "spokes":
		return Ignored, nil
	case r.Group == agentv1.Group && r.Resource == "machineclaims":
		class, err = m.claim(r)
	case r.Group == clusterv1.GroupVersion.Group && r.Verb == "patch" && r.Subresource == "":
		switch r.Resource {
		case "machinedeployments":
			class, err = m.deployment(r.Body)
		case "machines":
			class, err = machine(r.Body)
		case "machinesets":
			class, err = machineSet(r.Body)
		}
	case r.Group == clusterv1.GroupVersion.Group && r.Verb == "delete" && r.Resource == "machines":
		class = MachineDeleted
	}
	if class == "" || err != nil {
		if err == nil {
			body := r.Body
			if i := bytes.Index(body, []byte(`"status":`)); i >= 0 {
				body = body[i:]
			}
			err = fmt.Errorf("%s %s/%s %s: %.700s", r.Verb, r.Resource, r.Subresource, r.Name, body)
		}
		return Unknown, err
	}
	return class, nil
}

func (m *Memory) claim(r *Request) (Class, error) {
	if r.Verb == "delete" {
		return ClaimForgotten, nil
	}
	var c agentv1.MachineClaim
	if err := json.Unmarshal(r.Body, &c); err != nil {
		return "", err
	}
	if c.Spec.Adopt != "" {
		m.adopt(c.Spec.ClaimID)
	}
	switch {
	case r.Verb == "create" && c.Spec.NodeGroup == "":
		return TombstoneCreated, nil
	case r.Verb == "create" && m.wasLost(r.Namespace, c.Name):
		return ClaimRemade, nil
	case r.Verb == "create":
		return ClaimCreated, nil
	case r.Verb == "update" && r.Subresource == "":
		return ClaimMoved, nil
	case r.Verb != "update" || r.Subresource != "status":
		return "", nil
	}
	return claimStatus(&c), nil
}

func claimStatus(c *agentv1.MachineClaim) Class {
	s := &c.Status
	switch s.Phase {
	case agentv1.PhasePending:
		if len(s.History) > 1 {
			return ClaimExplained
		}
		return ClaimEntered
	case agentv1.PhaseBound:
		switch {
		case s.Reason == "MachineDeleting", s.Reason == "WaitingForInfrastructure", s.Reason == "WaitingForNode":
			return ClaimExplained
		case s.Reason == "NodeJoined":
			return NodeNoted
		case s.Reason == "ReturnRequested":
			return ReturnRequested
		case s.Reason == "Bound" && strings.HasPrefix(s.Message, "the claim's status was lost"):
			return ClaimRestored
		case s.Reason == "Bound":
			return ClaimBound
		}
	case agentv1.PhaseReleasing:
		switch {
		case strings.Contains(s.Message, "has been deleting for more than a minute"): // the reason comes from Cluster API
			return ClaimExplained
		case s.Reason == "ReleaseRequested", s.Reason == "Collected":
			return ClaimReleasing
		case s.Reason == "Failed", s.Reason == "Late": // one write of the agent, with or without the time of the failure
			return ClaimFailed
		case s.Reason == "Bound":
			return ClaimRestored // its status was lost while it was being released
		}
	case agentv1.PhaseEnded:
		if s.Reason == "NeverMade" {
			return TombstoneEngraved
		}
		return ClaimEnded
	}
	return ""
}

// operation is an operation of a JSON patch.
type operation struct {
	Op    string          `json:"op"`
	Path  string          `json:"path"`
	Value json.RawMessage `json:"value"`
}

// ledger is the part of a ledger that classification needs.
type ledger struct {
	Pending map[string]struct {
		UID types.UID `json:"u"`
	} `json:"pending"`
	Releasing map[types.UID]json.RawMessage `json:"releasing"`
	Marking   []types.UID                   `json:"marking"`
	Returning map[types.UID]json.RawMessage `json:"returning"`
}

func annotationPath(key string) string {
	return "/metadata/annotations/" + strings.ReplaceAll(key, "/", "~1")
}

// deployment classifies a JSON patch of a MachineDeployment, which tests the old values and sets
// the new ones.
func (m *Memory) deployment(body []byte) (Class, error) {
	var operations []operation
	if err := json.Unmarshal(body, &operations); err != nil {
		return "", err
	}
	var before, after *ledger
	var was, shall *int32
	pause := ""
	for _, o := range operations {
		var err error
		switch o.Path {
		case annotationPath(agentv1.LedgerAnnotation):
			if o.Op == "test" {
				before, _ = decodeLedger(o.Value) // an unreadable ledger is rebuilt
			} else {
				after, err = decodeLedger(o.Value)
			}
		case "/spec/replicas":
			n := new(int32)
			err = json.Unmarshal(o.Value, n)
			if o.Op == "test" {
				was = n
			} else {
				shall = n
			}
		case annotationPath(clusterv1.PausedAnnotation):
			if o.Op != "test" {
				pause = o.Op
			}
		}
		if err != nil {
			return "", err
		}
	}
	switch {
	case after == nil || was == nil:
		return "", nil
	case before == nil:
		return LedgerBegun, nil
	case pause == "add":
		return PausePut, nil
	case pause == "remove":
		return PauseRemoved, nil
	case shall != nil && *shall < *was:
		return ReplicasLowered, nil
	}
	return m.entries(before, after, shall != nil), nil
}

// entries classifies a write by its changes to the ledger's entries. The most consequential change
// counts.
func (m *Memory) entries(before, after *ledger, raised bool) Class {
	var entered, adopted, named bool
	for id, entry := range after.Pending {
		old, known := before.Pending[id]
		switch {
		case !known && m.isAdoption(id):
			adopted = true
		case !known:
			entered = true
		case old.UID == "" && entry.UID != "":
			named = true
		}
	}
	more := func(before, after map[types.UID]json.RawMessage) bool {
		return len(lo.OmitByKeys(after, slices.Collect(maps.Keys(before)))) > 0
	}
	switch {
	case adopted:
		return AdoptEntered
	case raised:
		return ReplicasRaised
	case entered:
		return SpareEntered
	case more(before.Releasing, after.Releasing):
		return ReleaseBegun
	case more(before.Returning, after.Returning):
		return FloorRaised
	case named:
		return MachineNamed
	case len(lo.Without(after.Marking, before.Marking...)) > 0:
		return FloorChosen
	}
	return LedgerTidied
}

func decodeLedger(value json.RawMessage) (*ledger, error) {
	var text string
	if err := json.Unmarshal(value, &text); err != nil {
		return nil, err
	}
	var l ledger
	if err := json.Unmarshal([]byte(text), &l); err != nil {
		return nil, err
	}
	return &l, nil
}

// changes are the changes by a patch that classification needs. A nil value in a map means that the
// key is removed.
type changes struct {
	labels, annotations map[string]*string
	// finalizers is nil if they are unchanged.
	finalizers *[]string
	replicas   bool
	// other is set if there are further changes.
	other bool
}

// changesOf reads a merge patch or a JSON patch.
func changesOf(body []byte) (changes, error) {
	if bytes.HasPrefix(bytes.TrimSpace(body), []byte("[")) {
		return jsonPatch(body)
	}
	var p struct {
		Metadata struct {
			Labels      map[string]*string `json:"labels"`
			Annotations map[string]*string `json:"annotations"`
			Finalizers  json.RawMessage    `json:"finalizers"`
		} `json:"metadata"`
		Spec struct {
			Replicas *int32 `json:"replicas"`
		} `json:"spec"`
	}
	if err := json.Unmarshal(body, &p); err != nil {
		return changes{}, err
	}
	c := changes{labels: p.Metadata.Labels, annotations: p.Metadata.Annotations, replicas: p.Spec.Replicas != nil}
	if len(p.Metadata.Finalizers) > 0 {
		c.finalizers = new([]string)
		if err := json.Unmarshal(p.Metadata.Finalizers, c.finalizers); err != nil {
			return changes{}, err
		}
	}
	return c, nil
}

func jsonPatch(body []byte) (changes, error) {
	var operations []operation
	if err := json.Unmarshal(body, &operations); err != nil {
		return changes{}, err
	}
	c := changes{labels: map[string]*string{}, annotations: map[string]*string{}}
	for _, o := range operations {
		if o.Op == "test" {
			continue
		}
		label, isLabel := strings.CutPrefix(o.Path, "/metadata/labels/")
		annotation, isAnnotation := strings.CutPrefix(o.Path, "/metadata/annotations/")
		var value *string
		if (isLabel || isAnnotation) && o.Op != "remove" {
			value = new(string)
			if err := json.Unmarshal(o.Value, value); err != nil {
				return changes{}, err
			}
		}
		unescape := strings.NewReplacer("~1", "/", "~0", "~")
		switch {
		case isLabel:
			c.labels[unescape.Replace(label)] = value
		case isAnnotation:
			c.annotations[unescape.Replace(annotation)] = value
		case o.Path == "/metadata/finalizers":
			c.finalizers = new([]string)
			if o.Op != "remove" {
				if err := json.Unmarshal(o.Value, c.finalizers); err != nil {
					return changes{}, err
				}
			}
		case o.Path == "/spec/replicas":
			c.replicas = true
		case o.Path == "/metadata/labels", o.Path == "/metadata/annotations": // created for the keys that follow
		default:
			c.other = true
		}
	}
	return c, nil
}

func machine(body []byte) (Class, error) {
	c, err := changesOf(body)
	if err != nil || c.other || c.replicas {
		return "", err
	}
	if label, touched := c.labels[agentv1.ClaimLabel]; touched {
		switch {
		case label != nil:
			return MachineLabelled, nil
		case c.annotations[agentv1.FloorAnnotation] != nil:
			return MachineReturned, nil
		}
		return MachineUnlabelled, nil
	}
	if mark := c.annotations[agentv1.FloorAnnotation]; mark != nil {
		return FloorMarked, nil
	}
	switch {
	case c.finalizers != nil && slices.Contains(*c.finalizers, agentv1.ReleaseFinalizer):
		return MachineHeld, nil
	case c.finalizers != nil:
		return FinalizerRemoved, nil
	case len(c.labels) == 0 && len(c.annotations) == 0:
		return MachineHeld, nil // a repetition that is already in place
	}
	return "", nil
}

func machineSet(body []byte) (Class, error) {
	c, err := changesOf(body)
	if err != nil || c.other {
		return "", err
	}
	paused, touched := c.annotations[clusterv1.PausedAnnotation]
	switch {
	case c.replicas:
		return SetLowered, nil
	case touched && paused != nil:
		return SetPaused, nil
	case touched:
		return SetUnpaused, nil
	}
	return "", nil
}
