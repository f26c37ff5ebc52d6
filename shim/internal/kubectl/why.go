package kubectl

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/samber/lo"
	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/kubectl/explain"
)

// aliases are other words for the kinds.
var aliases = map[string]explain.Kind{
	"pod": explain.Pod, "pods": explain.Pod, "po": explain.Pod,
	"nodeclaim": explain.NodeClaim, "nodeclaims": explain.NodeClaim,
	"node": explain.Node, "nodes": explain.Node, "no": explain.Node,
	"machine": explain.Machine, "machines": explain.Machine,
}

func whyCommand(access *Access) *cobra.Command {
	return &cobra.Command{
		Use:   "why pod|nodeclaim|node|machine NAME",
		Short: "Explain why a pod, NodeClaim, Node or Machine is in its state, and what to do next",
		Example: `  kubectl capi why pod web-5d4f8 -n shop
  kubectl capi why nodeclaim/default-x7k2q
  kubectl capi why machine workers-vb2lw-9xk4d --hub-kubeconfig hub.kubeconfig`,
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: access.completeWhy,
		RunE: func(cmd *cobra.Command, args []string) error {
			kind, name, err := parseObject(args)
			if err != nil {
				return err
			}
			namespace := ""
			if kind == explain.Pod {
				namespace = access.PodNamespace()
				if in, pod, err := split(name); err == nil {
					namespace, name = in, pod
				}
			}
			access.setUpCore(cmd.Context())
			situation, err := access.Situation(cmd.Context(), kind, namespace, name)
			if err != nil {
				return err
			}
			explanation := explain.Explain(situation)
			if structured(access.Output) {
				return writeValue(cmd.OutOrStdout(), access.Output, explanation)
			}
			writeExplanation(cmd.OutOrStdout(), &explanation, columns(cmd.OutOrStdout()))
			return nil
		},
	}
}

// parseObject parses KIND NAME or KIND/NAME.
func parseObject(args []string) (explain.Kind, string, error) {
	if len(args) == 1 {
		kind, name, found := strings.Cut(args[0], "/")
		if !found {
			return "", "", problem(fmt.Errorf("%q names no object", args[0]), "Write why pod NAME, why nodeclaim NAME, why node NAME or why machine NAME.")
		}
		args = []string{kind, name}
	}
	kind, known := aliases[strings.ToLower(args[0])]
	if !known || args[1] == "" {
		return "", "", problem(fmt.Errorf("%q is not a kind that can be explained", args[0]),
			"Write why pod NAME, why nodeclaim NAME, why node NAME or why machine NAME.")
	}
	return kind, args[1], nil
}

// marks shows a state in one character.
var marks = map[explain.State]string{
	explain.OK: "✓", explain.Waiting: "…", explain.Blocked: "✗", explain.Ending: "↓", explain.Unknown: "?", explain.Absent: "·",
}

// writeExplanation writes an explanation for people, in lines of at most width characters, or
// without limit if width is 0.
func writeExplanation(to io.Writer, e *explain.Explanation, width int) {
	rest := func(used int) int {
		if width == 0 {
			return 0
		}
		return max(width-used, 20)
	}
	fmt.Fprintf(to, "%s: %s\n\n", oneLine(e.Subject), e.State)
	for _, line := range wrap(oneLine(e.Verdict), rest(2)) {
		fmt.Fprintln(to, "  "+line)
	}
	fmt.Fprintln(to)
	kinds := lo.Max(lo.Map(e.Steps, func(s explain.Step, _ int) int { return utf8.RuneCountInString(s.Object) }))
	names := min(lo.Max(lo.Map(e.Steps, func(s explain.Step, _ int) int { return utf8.RuneCountInString(s.Name) })), 40)
	for _, step := range e.Steps {
		head := fmt.Sprintf("%s %-*s  %-*s  ", marks[step.State], kinds, step.Object, names, step.Name)
		indent := strings.Repeat(" ", 1+1+kinds+2+names+2)
		for i, text := range append([]string{step.Message}, step.Details...) {
			for j, line := range wrap(oneLine(text), rest(len(indent))) {
				fmt.Fprintln(to, strings.TrimRight(lo.Ternary(i+j == 0, head, indent)+line, " "))
			}
		}
	}
	if len(e.Next) == 0 {
		return
	}
	fmt.Fprintln(to, "\nNext:")
	for _, next := range e.Next {
		for i, line := range wrap(oneLine(next), rest(4)) {
			fmt.Fprintln(to, lo.Ternary(i == 0, "  - ", "    ")+line)
		}
	}
}

// completeWhy completes the kinds, and the names of objects.
func (a *Access) completeWhy(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if err := a.complete(cmd.Flags()); err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	if len(args) == 0 {
		return lo.Map(explain.Kinds(), func(k explain.Kind, _ int) string { return string(k) }), cobra.ShellCompDirectiveNoFileComp
	}
	if len(args) > 1 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []string
	if kind := aliases[args[0]]; kind == explain.Machine {
		names = a.machineNames(cmd)
	} else if list := map[explain.Kind]client.ObjectList{
		explain.Pod: &corev1.PodList{}, explain.NodeClaim: &karpv1.NodeClaimList{}, explain.Node: &corev1.NodeList{},
	}[kind]; list != nil {
		names = a.names(cmd, list)
	}
	slices.Sort(names)
	return names, cobra.ShellCompDirectiveNoFileComp
}

// names returns the names of the objects of a kind; none if they cannot be read.
func (a *Access) names(cmd *cobra.Command, list client.ObjectList) []string {
	spoke, err := a.Spoke()
	if err != nil {
		return nil
	}
	var options []client.ListOption
	if _, pods := list.(*corev1.PodList); pods {
		options = append(options, client.InNamespace(a.PodNamespace()))
	}
	if err := spoke.List(cmd.Context(), list, options...); err != nil {
		return nil
	}
	switch l := list.(type) {
	case *corev1.PodList:
		return lo.Map(l.Items, func(o corev1.Pod, _ int) string { return o.Name })
	case *corev1.NodeList:
		return lo.Map(l.Items, func(o corev1.Node, _ int) string { return o.Name })
	case *karpv1.NodeClaimList:
		return lo.Map(l.Items, func(o karpv1.NodeClaim, _ int) string { return o.Name })
	}
	return nil
}

func (a *Access) machineNames(cmd *cobra.Command) []string {
	agent, err := a.Agent(cmd.Context())
	if err != nil {
		return nil
	}
	defer func() { _ = agent.Close() }()
	response, err := agent.Machines.ListMachines(cmd.Context(), &agentv1alpha1.ListMachinesRequest{Cluster: agent.Cluster})
	if err != nil {
		return nil
	}
	return lo.Map(response.GetMachines(), func(m *agentv1alpha1.Machine, _ int) string { return m.GetName() })
}
