"""PyTorch Geometric: convolutions on a graph, batches of graphs, a sparse adjacency."""

# %%
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GCNConv, global_mean_pool
from torch_geometric.transforms import AddSelfLoops, RandomNodeSplit
from torch_geometric.utils import to_dense_adj, to_undirected

# %%
edges = to_undirected(torch.randint(500, (2, 2000)))
graph = Data(x=torch.randn(500, 64), edge_index=edges, y=torch.randint(4, (500,)))
graph = RandomNodeSplit(num_val=50, num_test=50)(AddSelfLoops()(graph))
print(graph)


# %%
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (
            GCNConv(64, 128, cached=True),
            GATConv(128, 4, heads=2, concat=False),
        )

    def forward(self, x, edges):
        return self.second(self.first(x, edges).relu(), edges)


# %%
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)

# %%
for _ in range(5):
    optimizer.zero_grad()
    found = net(graph.x, graph.edge_index)
    loss = torch.nn.functional.cross_entropy(found[graph.train_mask], graph.y[graph.train_mask])
    loss.backward()
    optimizer.step()
print(loss.item())

# %%
net.eval()
with torch.no_grad():
    print((net(graph.x, graph.edge_index).argmax(1) == graph.y)[graph.test_mask].sum())

# %%
small = [
    Data(x=torch.randn(9, 16), edge_index=torch.randint(9, (2, 20)), y=torch.tensor([index % 2]))
    for index in range(24)
]
loader = DataLoader(small, batch_size=8, shuffle=True)

# %%
layer = GCNConv(16, 2)
for batch in loader:
    print(global_mean_pool(layer(batch.x, batch.edge_index), batch.batch).sum().item())

# %%
torch.save((net.state_dict(), graph), "net.pt")
state, graph_again = torch.load("net.pt", weights_only=False)
print(net.load_state_dict(state), torch.equal(graph_again.x, graph.x))

# %%
adjacency = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (500, 500)).coalesce()
print((adjacency @ graph.x).sum().item(), to_dense_adj(edges).sum().item())
